"""Mistake: a DistributedSampler without `set_epoch`.

    python -m tutorial.mistakes.no_set_epoch

The sampler shuffles by its seed plus its epoch, and does not count epochs itself. Without `set_epoch` the
epoch stays 0: each rank reads the same windows in the same order in every epoch, and nothing fails.
Right: every rank calls `sampler.set_epoch(epoch)` before each epoch. A few windows then match by chance.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOWS, WORLD_SIZE, BATCH_SIZE = 400, 2, 8


def read(rank: int, set_epoch: bool) -> list[torch.Tensor]:
    """The numbers of the windows that a rank reads, in order, in each of two epochs."""
    dataset = TensorDataset(torch.arange(WINDOWS))
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, WORLD_SIZE, rank, shuffle=True)
    loader = DataLoader(dataset, BATCH_SIZE, sampler=sampler)
    orders = []
    for epoch in range(2):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(torch.cat([numbers for (numbers,) in loader]))
    print(f"set_epoch {set_epoch!s:5} rank {rank}: {orders[0][:5].tolist()}, then {orders[1][:5].tolist()}")
    return orders


def count_repeated(set_epoch: bool) -> int:
    orders = [read(rank, set_epoch) for rank in range(WORLD_SIZE)]
    return sum(int((first == second).sum()) for first, second in orders)


if __name__ == "__main__":
    wrong, right = count_repeated(set_epoch=False), count_repeated(set_epoch=True)
    print(f"wrong: {wrong} windows at the same place of a rank's order in both epochs")
    print(f"right: {right} windows at the same place of a rank's order in both epochs")
