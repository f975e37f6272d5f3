"""Mistake: a validation loss through DistributedSampler, which pads.

    python -m tutorial.mistakes.padded_evaluation

The sampler gives all ranks equally many windows. If these do not divide evenly, it repeats the first ones,
which then count twice: the loss depends on the number of workers.
Right: each window on one rank, and an all-reduce of the sum of losses and of the number of windows.
"""

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, TensorDataset

from tutorial.mistakes.ranks import run_on_ranks

TEXT = torch.from_file("data/input.txt", size=1_000_000, dtype=torch.uint8).long()
WINDOWS = TEXT[-9 * 64 :].view(9, 64)  # nine windows on four ranks
LOSS_OF_CHARACTER = -(TEXT.bincount() / len(TEXT)).log()  # the simplest model: how often each character comes


def evaluate(rank: int) -> list[float]:
    """The loss over all ranks: of the sampler's windows, and of each window once."""
    padded: list[int] = list(DistributedSampler(TensorDataset(WINDOWS), shuffle=False))
    once = list(range(rank, len(WINDOWS), dist.get_world_size()))
    losses = []
    for mine in (padded, once):
        sum_and_count = torch.tensor([LOSS_OF_CHARACTER[WINDOWS[mine]].mean(dim=1).sum(), len(mine)])
        dist.all_reduce(sum_and_count)
        losses.append(float(sum_and_count[0] / sum_and_count[1]))
    return losses


if __name__ == "__main__":
    alone = float(LOSS_OF_CHARACTER[WINDOWS].mean())
    padded, once = run_on_ranks(evaluate, world_size=4)[0]
    print(f"loss on 1 worker {alone:.6f}, on 4 workers {padded:.6f} with the sampler, {once:.6f} without")
    print(f"wrong: {abs(padded - alone):.6f} error of the loss on 4 workers")
    print(f"right: {abs(once - alone):.6f} error of the loss on 4 workers")
