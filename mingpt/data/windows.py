"""Windows of a token array: `block_size + 1` neighbouring tokens, an input and its targets one to the right.

A batch of windows is one gather from the array. Which window is read when is decided by the sampler.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

PREFETCH_BATCHES = 64  # gathered, and moved to the device, at once


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a token array, by the position of their first token.

    `dataset[start]` is (inputs, targets), each (block_size,) int64; `__getitems__` gathers a batch at once.
    """

    def __init__(self, tokens: np.ndarray, block_size: int) -> None:
        self.tokens = torch.from_numpy(tokens)
        self.block_size = block_size
        self._offsets = torch.arange(block_size + 1)

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]

    def __getitems__(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(starts), block_size) int64."""
        windows = self.tokens[torch.as_tensor(starts).unsqueeze(1) + self._offsets].long()  # (B, T + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def batches(
        self, starts: Iterable[int], batch_size: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, ...]]:
        """The windows that begin at `starts`, in batches: inputs, targets, then both on the device."""
        remaining = iter(starts)
        while True:
            chunk = list(itertools.islice(remaining, PREFETCH_BATCHES * batch_size))
            if not chunk:
                return
            on_cpu = self.__getitems__(chunk)
            on_device = [part.to(device) for part in on_cpu]
            yield from zip(*(part.split(batch_size) for part in (*on_cpu, *on_device)), strict=True)

    def eval_batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Every token but the first as a target exactly once, in batches of windows end to end.

        Each batch is (<= batch_size, block_size); a shorter last window is a batch of its own.
        """
        targets = len(self.tokens) - 1
        whole = targets // self.block_size
        starts = torch.arange(whole) * self.block_size
        for batch in starts.split(batch_size) if whole else ():
            yield self.__getitems__(batch)  # type: ignore[arg-type]
        if targets % self.block_size:
            last = self.tokens[whole * self.block_size :].long().unsqueeze(0)
            yield last[:, :-1], last[:, 1:]
