"""Who reads which window at which step: a shuffled deck without end, dealt in micro-batches."""

from collections.abc import Iterator

import numpy as np
from torch.utils.data import DistributedSampler

from mingpt.data import CharDataset

ROUNDS = 6
AHEAD = 32  # steps dealt at once: a permutation costs about as much for a thousand windows as for ten
MIX_1, MIX_2, GOLDEN = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0x9E3779B97F4A7C15
WORD = 0xFFFFFFFFFFFFFFFF


def mix(*numbers: int) -> int:
    """64 well-mixed bits that depend on every one of `numbers` and their order (SplitMix64's finalizer, Steele et al. 2014)."""
    state = 0
    for number in numbers:
        state = (state + number + GOLDEN) & WORD
        state = ((state ^ (state >> 30)) * MIX_1) & WORD
        state = ((state ^ (state >> 27)) * MIX_2) & WORD
        state ^= state >> 31
    return state


def permute(places: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a keyed permutation of range(size) sends `places`, (N,) uint64 to (N,) uint64, in memory that does not grow with `size`.

    A balanced Feistel network over the next power of four, walked until it lands inside (Black and Rogaway 2002, "Ciphers with
    arbitrary finite domains"). Neither numpy nor torch promises its random streams across versions; this is ours.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, number)) for number in range(ROUNDS)]
    outside = np.ones(len(places), dtype=bool)
    places = places.astype(np.uint64)
    while outside.any():
        left, right = places[outside] >> half, places[outside] & mask
        for round_key in keys:
            mixed = (right + round_key) * np.uint64(MIX_1)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(MIX_2)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        places[outside] = (left << half) | right
        outside = places >= size
    return places


class ElasticSampler(DistributedSampler[int]):
    """Deal one shuffled deck of windows to however many workers sit at the table.

    The deck depends on (seed, epoch) alone. Save on eight workers, resume on three: each window of the epoch is still
    dealt exactly once. The whole state is `dealt`, one integer: the windows that all workers together were given so far.

    An epoch's windows lie end to end from an offset that the epoch draws; their order is a permutation that takes no
    memory. A step takes the next `batch_size` of them, across the end of an epoch too, in micro-batches of `micro_batch_size`.
    Worker r of n takes micro-batches r * m // n up to (r + 1) * m // n of a step's m: contiguous runs, as even as can be.
    Iterating yields the start positions of this worker's windows, from `dealt` on, without end.
    """

    def __init__(self, dataset: CharDataset, *, batch_size: int, micro_batch_size: int, seed: int, num_replicas: int = 1, rank: int = 0) -> None:
        super().__init__(dataset, num_replicas=num_replicas, rank=rank, shuffle=True, seed=seed, drop_last=False)
        self.batch_size, self.micro_batch_size = batch_size, micro_batch_size
        self.block_size = dataset.block_size
        self.windows_per_epoch = (len(dataset.tokens) - 1) // dataset.block_size
        self.offsets = (len(dataset.tokens) - 1) % dataset.block_size + 1
        self.dealt = 0

    def seek(self, dealt: int) -> None:
        """Go on as if `dealt` windows had been dealt already, whoever they went to. Takes no time and no memory."""
        self.dealt = dealt

    def shares(self) -> list[range]:
        """Which of a step's micro-batches each worker reads; empty for a worker too many."""
        count, workers = self.batch_size // self.micro_batch_size, self.num_replicas
        return [range(rank * count // workers, (rank + 1) * count // workers) for rank in range(workers)]

    def micro_batches(self) -> range:
        """Those of this worker."""
        return self.shares()[self.rank]

    def deal(self, first: int, count: int) -> np.ndarray:
        """(count,) start positions of the windows that are dealt `first`, `first` + 1, ... since the run began."""
        starts = []
        while count:
            epoch, place = divmod(first, self.windows_per_epoch)
            here = min(count, self.windows_per_epoch - place)
            order = permute(np.arange(place, place + here, dtype=np.uint64), self.windows_per_epoch, mix(self.seed, epoch, 0))
            offset = mix(self.seed, epoch, 1) % self.offsets
            starts.append(order.astype(np.int64) * self.block_size + offset)
            first, count = first + here, count - here
        return np.concatenate(starts) if starts else np.empty(0, dtype=np.int64)

    def __iter__(self) -> Iterator[int]:
        next_step, mine = self.dealt, self.micro_batches()
        while mine:
            steps = self.deal(next_step, AHEAD * self.batch_size).reshape(AHEAD, self.batch_size)
            yield from steps[:, mine.start * self.micro_batch_size : mine.stop * self.micro_batch_size].ravel().tolist()
            next_step += steps.size

    def __len__(self) -> int:
        """Windows that an epoch holds for all workers together."""
        return self.windows_per_epoch
