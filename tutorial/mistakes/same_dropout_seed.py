"""Mistake: the same seed on all ranks when dropout draws.

    python -m tutorial.mistakes.same_dropout_seed

One seed gives all ranks the same weights, and then the same dropout masks too: the masks of a global batch
repeat. If its windows are alike, averaging over ranks then leaves more of dropout's noise in the gradient.
Right: the weights by a common seed, after that a seed that depends on the rank.
"""

import torch
from torch import Tensor, nn

from tutorial.mistakes.ranks import run_on_ranks

SEED, WORLD_SIZE, DRAWS = 1337, 2, 1000


def train(rank: int, world_size: int, seed_by_rank: bool) -> tuple[Tensor, Tensor]:
    """A dropout mask, and (DRAWS, 1, 64) gradients by the same weights and the rank's share of one batch."""
    torch.manual_seed(SEED)
    dropout, head = nn.Dropout(0.1), nn.Linear(64, 1)
    inputs = torch.rand(16, 64).chunk(world_size)[rank]
    if seed_by_rank:
        torch.manual_seed(SEED + 1 + rank)
    mask = dropout(torch.ones(100_000)) == 0
    losses = ((head(dropout(inputs)) - 1).square().mean() for _ in range(DRAWS))
    return mask, torch.stack([torch.autograd.grad(loss, head.weight)[0] for loss in losses])


if __name__ == "__main__":
    alone = train(0, 1, seed_by_rank=False)[1].var(dim=0).sum()
    variances = []
    for seed_by_rank in (False, True):
        (mask_0, gradients_0), (mask_1, gradients_1) = run_on_ranks(train, WORLD_SIZE, seed_by_rank)
        share = (mask_0 & mask_1).sum() / mask_0.sum()
        print(f"seed by rank {seed_by_rank!s:5}: rank 1 drops {share:.1%} of what rank 0 drops")
        variances.append(((gradients_0 + gradients_1) / WORLD_SIZE).var(dim=0).sum() / alone)
    print(f"wrong: {variances[0]:.2f} times the variance that one process's gradient has by dropout")
    print(f"right: {variances[1]:.2f} times the variance that one process's gradient has by dropout")
