"""Read windows of tokens in batches, and choose the windows that each worker reads.

A window is `block_size + 1` consecutive tokens: an input, and its targets one token to the right. Only the
last window of an evaluation may be shorter. The windows of an epoch are ordered by a seeded permutation.
"""

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler

from mingpt.base.errors import UserError
from mingpt.data.shards import TokenShards

PREFETCH_BATCHES = 64  # batches that are gathered, and moved to the device, together
PREFETCH_FROM_DISK = 128  # windows of token shards that are read ahead
FEISTEL_ROUNDS = 6
PREFETCH_STEPS = 32  # steps whose windows are computed at once: a thousand windows take as long as ten
MIX_1, MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF


class WindowDataset(Dataset[tuple[Tensor, Tensor]]):
    """All windows of a token array or of token shards, by the position of their first token.

    `dataset[start]` is (inputs, targets), each (block_size,) int64; `__getitems__` gathers a batch at once.
    With `vocab_size`, reading a token of shards that is not below `vocab_size` raises UserError.
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
        """Return inputs and targets of the windows at `starts`, each (len(starts), block_size) int64."""
        windows = self.read(starts, self.block_size + 1)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> Tensor:
        """Return the `length` tokens from each of `starts` on, (len(starts), length) int64.

        Raises IndexError if a window extends past the end of the tokens. With shards, also raises the errors
        of `TokenShards.read`. If `vocab_size` is known, a token of shards that is not below `vocab_size`
        raises UserError.
        """
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
        """Yield batches of windows, each as (inputs, targets, inputs on `device`, targets on `device`).

        Every tensor is (batch_size, block_size), but the last batch may be smaller. `starts`, the positions
        of the windows' first tokens, may be endless and is read ahead. With shards, an error of `read` for a
        batch is raised only after all earlier batches have been yielded.
        """
        remaining = iter(starts)
        if isinstance(self.tokens, Tensor):
            while chunk := list(itertools.islice(remaining, PREFETCH_BATCHES * batch_size)):
                yield from self.split(self.__getitems__(chunk), batch_size, device)
            return
        reading = deque[Future[tuple[Tensor, Tensor]]]()
        with ThreadPoolExecutor(1) as thread:  # the next batches are read while these are used
            while batch := list(itertools.islice(remaining, batch_size)):
                reading.append(thread.submit(self.__getitems__, batch))
                if len(reading) > max(1, PREFETCH_FROM_DISK // batch_size):
                    yield from self.split(reading.popleft().result(), batch_size, device)
            for windows in reading:
                yield from self.split(windows.result(), batch_size, device)

    def split(
        self, on_cpu: tuple[Tensor, Tensor], batch_size: int, device: torch.device | str
    ) -> Iterator[tuple[Tensor, ...]]:
        """Split `on_cpu`, (inputs, targets) of many windows, and yield batches as `batches` does."""
        on_device = to_device(on_cpu, device)
        yield from zip(*(part.split(batch_size) for part in (*on_cpu, *on_device)), strict=True)

    def eval_batches(self, batch_size: int, max_windows: int | None = None) -> list[tuple[np.ndarray, int]]:
        """Return the arguments of `read`, (starts, length), for each batch of an evaluation.

        A batch has up to `batch_size` windows. Without `max_windows` the windows lie end to end, and every
        token but the first is a target exactly once. A last window of fewer than `block_size` targets is a
        batch of its own. If there are more than `max_windows` windows, only `max_windows` windows of
        `block_size` targets are used, evenly spaced.
        """
        whole, rest = divmod(len(self.tokens) - 1, self.block_size)
        count = whole if max_windows is None else min(max_windows, whole)
        starts = np.arange(count) * whole // count * self.block_size
        batches = [
            (starts[first : first + batch_size], self.block_size + 1) for first in range(0, count, batch_size)
        ]
        if rest and (max_windows is None or max_windows > whole):
            batches.append((np.array([whole * self.block_size]), rest + 1))
        return batches


CharDataset = WindowDataset  # the name of this class in minGPT, where tokens are characters


def to_device(batch: tuple[Tensor, Tensor], device: torch.device | str) -> tuple[Tensor, ...]:
    """Return inputs and targets, two tensors of equal shape, on `device`; a copy to CUDA is asynchronous."""
    if torch.device(device).type != "cuda":
        return tuple(part.to(device) for part in batch)
    # The allocator of pinned memory does not use the pages again until the copy has ended.
    return torch.stack(batch).pin_memory().to(device, non_blocking=True).unbind()


def mix(*numbers: int) -> int:
    """Return a 64-bit hash of `numbers` and their order (SplitMix64's finalizer, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & MASK_64
        state = ((state ^ (state >> 30)) * MIX_1) & MASK_64
        state = ((state ^ (state >> 27)) * MIX_2) & MASK_64
        state ^= state >> 31
    return state


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return the images of `indices`, (N,) uint64, in the permutation of range(size) that `key` selects.

    Memory does not grow with `size`. A balanced Feistel network permutes the numbers below a power of four.
    The network is applied again until the result is below `size` (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"). The result does not depend on the versions of numpy and torch.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, number)) for number in range(FEISTEL_ROUNDS)]
    outside = np.ones(len(indices), dtype=bool)
    indices = indices.astype(np.uint64)
    while outside.any():
        left, right = indices[outside] >> half, indices[outside] & mask
        for round_key in keys:
            mixed = (right + round_key) * np.uint64(MIX_1)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(MIX_2)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        indices[outside] = (left << half) | right
        outside = indices >= size
    return indices


def micro_batch_shares(count: int, workers: int) -> list[range]:
    """Return, for each rank, the consecutive numbers of its share of `count` micro-batches.

    The lengths of the shares differ by at most one. If there are more workers than micro-batches, some shares
    are empty.
    """
    return [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]


class ElasticSampler(DistributedSampler[int]):
    """Assign the samples of a shuffled epoch, called windows here, to any number of workers.

    The order depends only on `dataset`, `seed` and the epoch, so a different number of workers can resume.
    The only state is the integer `windows_seen`, the number of windows that all workers together have read
    before iteration begins. `seek` sets `windows_seen`; iteration does not change it.

    `dataset` may be any data set with a length and samples by index. The samples of a WindowDataset overlap,
    so an epoch has only windows that lie end to end, from a random offset on. A step takes the next
    `batch_size` windows, even across the end of an epoch. Its micro-batches of `micro_batch_size` windows are
    assigned to `num_replicas` workers, in consecutive shares or, with `takes_turns`, one by one in turn. This
    worker is number `rank`.

    Iterating yields the index in `dataset` of each window of this worker, from `windows_seen` on, without
    end. A worker without micro-batches gets no windows. Raises ValueError if the data set is empty, if
    `micro_batch_size` does not divide `batch_size`, or if `rank` is not in range(num_replicas).
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        num_replicas: int = 1,
        rank: int = 0,
        takes_turns: bool = False,
    ) -> None:
        super().__init__(
            dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=False
        )
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.takes_turns = takes_turns
        self.stride = dataset.block_size if isinstance(dataset, WindowDataset) else 1
        count = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not promise a length
        if not count or batch_size % micro_batch_size:
            raise ValueError(
                f"{count} samples and steps of {batch_size} do not make micro-batches of {micro_batch_size}"
            )
        self.windows_per_epoch = -(-count // self.stride)
        self.offsets = (count - 1) % self.stride + 1
        self.windows_seen = 0

    def seek(self, windows_seen: int) -> None:
        """Make iteration begin after the first `windows_seen` windows of the run, in constant time."""
        self.windows_seen = windows_seen

    def micro_batches_by_rank(self) -> list[range]:
        """Return, for each rank, the numbers of the micro-batches that the rank reads in a step.

        A rank's numbers are consecutive. With `takes_turns`, rank r of n ranks instead reads micro-batches
        r, r + n, r + 2 n, ... If there are more ranks than micro-batches, some ranks read none.
        """
        count, workers = self.batch_size // self.micro_batch_size, self.num_replicas
        if self.takes_turns:
            return [range(rank, count, workers) for rank in range(workers)]
        return micro_batch_shares(count, workers)

    def my_micro_batches(self) -> range:
        return self.micro_batches_by_rank()[self.rank]

    def window_starts(self, first: int, count: int) -> np.ndarray:
        """Return the indices in `dataset` of `count` windows, from window `first` of the run, (count,) int64.

        Windows are counted from 0 over all epochs.
        """
        starts = []
        while count:
            epoch, place = divmod(first, self.windows_per_epoch)
            here = min(count, self.windows_per_epoch - place)
            places = np.arange(place, place + here, dtype=np.uint64)
            order = permute(places, self.windows_per_epoch, mix(self.seed, epoch, 0))
            offset = mix(self.seed, epoch, 1) % self.offsets
            starts.append(order.astype(np.int64) * self.stride + offset)
            first, count = first + here, count - here
        return np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[int]:
        next_window, micro_batches = self.windows_seen, self.my_micro_batches()
        size = self.micro_batch_size
        columns = np.add.outer(np.array(micro_batches, dtype=np.int64) * size, np.arange(size)).ravel()
        while micro_batches:
            starts = self.window_starts(next_window, PREFETCH_STEPS * self.batch_size)
            yield from starts.reshape(PREFETCH_STEPS, self.batch_size)[:, columns].ravel().tolist()
            next_window += starts.size

    def __len__(self) -> int:
        """Return the number of windows in an epoch, of all workers together."""
        return self.windows_per_epoch
