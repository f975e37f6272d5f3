"""Mistake: BatchNorm under DDP, with the statistics of each rank's own part of the batch.

    python -m tutorial.mistakes.batch_norm

DDP averages gradients, but each rank normalises with the mean and variance of its own samples. So the number
of ranks changes the trained model, and the running statistics that are saved know only rank 0's samples.
Right on GPUs: SyncBatchNorm.convert_sync_batchnorm(model), which uses the whole batch; it refuses CPUs.
Right everywhere: a norm within each sample, as LayerNorm here. Each way is compared with one process.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tutorial.mistakes.ranks import run_on_ranks


def train(rank: int, world_size: int, norm: type[nn.Module]) -> torch.Tensor:
    """What the model answers to new samples after 20 steps in batches of 16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), norm(32), nn.ReLU(), nn.Linear(32, 1))
    trained = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for inputs in torch.randn(20, 16, 8):
        mine = inputs.chunk(world_size)[rank]
        nn.functional.mse_loss(trained(mine), mine.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()(torch.randn(16, 8)).detach()


def train_both_ways(rank: int, world_size: int) -> list[torch.Tensor]:
    return [train(rank, world_size, norm) for norm in (nn.BatchNorm1d, nn.LayerNorm)]


if __name__ == "__main__":
    one_process, two_ranks = train_both_ways(0, 1), run_on_ranks(train_both_ways, 2)[0]
    wrong, right = ((one - two).abs().max() for one, two in zip(one_process, two_ranks, strict=True))
    print(f"wrong: {wrong:.6f} largest difference of an output between one process and two ranks")
    print(f"right: {right:.6f} largest difference of an output between one process and two ranks")
