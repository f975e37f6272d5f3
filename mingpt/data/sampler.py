"""Which worker reads which window at which step: a seeded permutation per epoch, cut into micro-batches."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from mingpt.data.windows import CharDataset

FEISTEL_ROUNDS = 6
PREFETCH_STEPS = 32  # a permutation of a thousand windows costs about as much as one of ten
MIX_1, MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF


def mix(*numbers: int) -> int:
    """A 64-bit hash of `numbers` and their order (SplitMix64's finalizer, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & MASK_64
        state = ((state ^ (state >> 30)) * MIX_1) & MASK_64
        state = ((state ^ (state >> 27)) * MIX_2) & MASK_64
        state ^= state >> 31
    return state


def permute(indices: np.ndarray, size: int, key: int) -> np.ndarray:
    """The images of `indices` under a keyed permutation of range(size); (N,) uint64 to (N,) uint64.

    Its memory does not grow with `size`: a balanced Feistel network over the next power of four, repeated
    until the result is in range (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). Neither
    numpy nor torch promises its random streams across versions, so this is our own.
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


class ElasticSampler(DistributedSampler[int]):
    """Assign the windows of a shuffled epoch to any number of workers.

    The order depends on (seed, epoch) alone. Save on eight workers, resume on three: each window of the epoch
    is still read exactly once. The whole state is `windows_seen`, one integer: the windows that all workers
    have read.

    An epoch's windows lie end to end from an offset that the epoch draws, in the order of a permutation. A
    step takes the next `batch_size` of them, across the end of an epoch too, in micro-batches of
    `micro_batch_size`. Iterating yields the first positions of this worker's windows, from `windows_seen` on,
    without end.
    """

    def __init__(
        self,
        dataset: CharDataset,
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
        self.block_size = dataset.block_size
        self.windows_per_epoch = (len(dataset.tokens) - 1) // dataset.block_size
        self.offsets = (len(dataset.tokens) - 1) % dataset.block_size + 1
        self.windows_seen = 0

    def seek(self, windows_seen: int) -> None:
        """Continue as if so many windows had been read already, by whichever workers. O(1)."""
        self.windows_seen = windows_seen

    def micro_batches_by_rank(self) -> list[range]:
        """Which of a step's m micro-batches each rank r of n reads: r * m // n to (r + 1) * m // n.

        Contiguous and as even as can be; if `takes_turns`, r, r + n, r + 2 n, ... Empty for surplus workers.
        """
        count, workers = self.batch_size // self.micro_batch_size, self.num_replicas
        if self.takes_turns:
            return [range(rank, count, workers) for rank in range(workers)]
        return [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]

    def my_micro_batches(self) -> range:
        return self.micro_batches_by_rank()[self.rank]

    def window_starts(self, first: int, count: int) -> np.ndarray:
        """(count,) first positions of the windows number `first`, `first` + 1, ... since the run began."""
        starts = []
        while count:
            epoch, place = divmod(first, self.windows_per_epoch)
            here = min(count, self.windows_per_epoch - place)
            places = np.arange(place, place + here, dtype=np.uint64)
            order = permute(places, self.windows_per_epoch, mix(self.seed, epoch, 0))
            offset = mix(self.seed, epoch, 1) % self.offsets
            starts.append(order.astype(np.int64) * self.block_size + offset)
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
        """Windows of an epoch, of all workers together."""
        return self.windows_per_epoch
