"""Mistake: a random generator in the dataset, which every DataLoader worker copies.

    python -m tutorial.mistakes.repeated_augmentation

Each worker of each rank begins with the same copy, and again in the next epoch, which starts new workers.
(numpy.random is seeded in each worker, from torch's seed; if ranks share that, as here, they share the
draws.) Right: a generator for each sample, by seed, epoch and index, whichever rank or worker reads it.
"""

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SEED, EPOCHS, WORLD_SIZE, SAMPLES = 1337, 2, 2, 64


class Augmented(Dataset[float]):
    def __init__(self, way: str) -> None:
        self.way, self.epoch, self.rng = way, 0, np.random.default_rng(SEED)

    def __getitem__(self, index: int) -> float:  # the number that the augmentation draws
        rng = np.random.default_rng((SEED, self.epoch, index)) if self.way == "right" else self.rng
        return np.random.random() if self.way == "numpy.random" else rng.random()


def count_distinct(way: str) -> int:
    drawn, dataset, samples = set(), Augmented(way), TensorDataset(torch.arange(SAMPLES))
    for rank in range(WORLD_SIZE):
        torch.manual_seed(SEED)
        sampler = DistributedSampler[Any](samples, WORLD_SIZE, rank)
        for dataset.epoch in range(EPOCHS):
            drawn |= {x.item() for x in DataLoader(dataset, sampler=sampler, num_workers=2)}
    return len(drawn)


if __name__ == "__main__":
    for way in ("numpy.random", "wrong", "right"):
        print(f"{way}: {count_distinct(way)} distinct numbers in {EPOCHS * SAMPLES} draws")
