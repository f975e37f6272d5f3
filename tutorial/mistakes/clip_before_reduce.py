"""Mistake: clipping each rank's gradient before the gradients are averaged.

    python -m tutorial.mistakes.clip_before_reduce

Each rank clips by its own norm: one with a large gradient counts less, and the average is not the clipped
gradient of the batch. Right: average first, as DDP has done when backward() returns, but not under no_sync.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from tutorial.mistakes.ranks import run_on_ranks


def gradient(inputs: Tensor, targets: Tensor) -> Tensor:
    weight = torch.zeros(64, requires_grad=True)
    return torch.autograd.grad((inputs @ weight - targets).square().mean(), weight)[0]


def clip(gradient: Tensor) -> Tensor:
    return gradient / gradient.norm().clamp(min=1.0)  # as clip_grad_norm_ does


def average(gradient: Tensor) -> Tensor:
    dist.all_reduce(gradient)
    return gradient / dist.get_world_size()


def compare(rank: int) -> list[Tensor]:
    torch.manual_seed(1337)
    inputs, targets = torch.randn(16, 64), 10 * torch.rand(16)
    mine = gradient(inputs[rank::2], targets[rank::2])
    return [average(clip(mine)), clip(average(mine)), clip(gradient(inputs, targets))]


if __name__ == "__main__":
    wrong, right, alone = run_on_ranks(compare)[0]
    print(f"wrong: {(wrong - alone).norm():.6f} distance from the clipped gradient of one process")
    print(f"right: {(right - alone).norm():.6f} distance from the clipped gradient of one process")
