"""Windows of a token array: `block_size + 1` neighbouring tokens, an input and its targets one to the right.

A batch of windows is one gather from the array. Which window is read when is decided by the sampler.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from mingpt.data.shards import TokenShards
from mingpt.errors import UserError

PREFETCH_BATCHES = 64  # gathered, and moved to the device, at once
PREFETCH_FROM_DISK = 128  # windows
FIRST_FROM_DISK = 8  # batches; the first step waits for them


class CharDataset(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a token array, or of token shards, by the position of their first token.

    `dataset[start]` is (inputs, targets), each (block_size,) int64; `__getitems__` gathers a batch at once.
    With `vocab_size` a window that holds another token raises UserError.
    """

    def __init__(
        self, tokens: np.ndarray | TokenShards, block_size: int, vocab_size: int | None = None
    ) -> None:
        self.tokens = torch.from_numpy(tokens) if isinstance(tokens, np.ndarray) else tokens
        self.block_size, self.vocab_size = block_size, vocab_size

    def __len__(self) -> int:
        return len(self.tokens) - self.block_size

    def __getitem__(self, start: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.__getitems__([start])
        return inputs[0], targets[0]

    def __getitems__(self, starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (len(starts), block_size) int64."""
        windows = self.read(starts, self.block_size + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def read(self, starts: Sequence[int], length: int) -> Tensor:
        """(len(starts), length) int64: the tokens from each of `starts` on. Raises UserError."""
        if isinstance(self.tokens, Tensor):
            return self.tokens[torch.as_tensor(starts).unsqueeze(1) + torch.arange(length)].long()
        windows = torch.from_numpy(self.tokens.read(starts, length))
        if self.vocab_size is not None and int(windows.max()) >= self.vocab_size:
            row, column = (windows >= self.vocab_size).nonzero()[0].tolist()
            raise UserError(
                f"{self.tokens.where(starts[row] + column)} is {int(windows[row, column])}, and the "
                f"vocabulary has {self.vocab_size} tokens: set data.vocab_size, or data.tokenizer, to "
                "what the shards were made with"
            )
        return windows

    def batches(
        self, starts: Iterable[int], batch_size: int, device: torch.device | str = "cpu"
    ) -> Iterator[tuple[Tensor, ...]]:
        """The windows that begin at `starts`, in batches: inputs, targets, then both on the device.

        Raises UserError for a batch that cannot be used, after those before it.
        """
        remaining = iter(starts)
        if isinstance(self.tokens, Tensor):
            while chunk := list(itertools.islice(remaining, PREFETCH_BATCHES * batch_size)):
                yield from self.split(self.__getitems__(chunk), batch_size, device)
            return
        count = min(PREFETCH_BATCHES, math.ceil(PREFETCH_FROM_DISK / batch_size)) * batch_size
        chunk = list(itertools.islice(remaining, min(count, FIRST_FROM_DISK * batch_size)))
        with ThreadPoolExecutor(1) as thread:  # the next windows are read while these are used
            reading = thread.submit(self.__getitems__, chunk)
            while chunk:
                this, being_read = chunk, reading
                chunk = list(itertools.islice(remaining, count))
                if chunk:
                    reading = thread.submit(self.__getitems__, chunk)
                try:
                    windows = being_read.result()
                except UserError:  # the batches before the bad one can be used
                    for first in range(0, len(this), batch_size):
                        batch = this[first : first + batch_size]
                        yield from self.split(self.__getitems__(batch), batch_size, device)
                    raise
                yield from self.split(windows, batch_size, device)

    def split(
        self, on_cpu: tuple[Tensor, Tensor], batch_size: int, device: torch.device | str
    ) -> Iterator[tuple[Tensor, ...]]:
        """As `batches`, of windows that have been read."""
        on_device = [part.to(device) for part in on_cpu]
        yield from zip(*(part.split(batch_size) for part in (*on_cpu, *on_device)), strict=True)

    def eval_batches(self, batch_size: int, max_windows: int | None = None) -> "EvalBatches":
        """Windows end to end; or, where that is fewer, `max_windows` evenly spaced ones."""
        return EvalBatches(self, batch_size, max_windows)


class EvalBatches(Sequence[tuple[Tensor, Tensor]]):
    """Batches of inputs and targets, each (<= batch_size, block_size) int64, read when they are asked for.

    Together every token but the first is a target exactly once, a shorter last window being a batch of its
    own; with `max_windows`, where that is fewer, so many evenly spaced whole windows.
    """

    def __init__(self, dataset: CharDataset, batch_size: int, max_windows: int | None) -> None:
        self.dataset, self.batch_size = dataset, batch_size
        self.whole, rest = divmod(len(dataset.tokens) - 1, dataset.block_size)
        is_subset = max_windows is not None and max_windows < self.whole + (rest > 0)
        self.windows = max_windows if max_windows is not None and is_subset else self.whole
        self.has_last = rest > 0 and not is_subset

    def __len__(self) -> int:
        return math.ceil(self.windows / self.batch_size) + self.has_last

    def __getitem__(self, number: Any) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        block_size = self.dataset.block_size
        first = number * self.batch_size
        if first >= self.windows:
            start = self.whole * block_size
            last = self.dataset.read([start], len(self.dataset.tokens) - start)
            return last[:, :-1], last[:, 1:]
        numbers = range(first, min(first + self.batch_size, self.windows))
        return self.dataset.__getitems__([one * self.whole // self.windows * block_size for one in numbers])
