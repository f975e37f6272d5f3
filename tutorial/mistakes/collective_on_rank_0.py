"""Mistake: a collective that only rank 0 calls.

    python -m tutorial.mistakes.collective_on_rank_0

Only rank 0 logs the mean loss, so the all_reduce stands under `if rank == 0` as well. It meets the others'
next collective, here a barrier, and all wait until the timeout: gloo's 30 minutes, here 3 s. (An all_reduce
of the same size would be added without an error.) Right: all ranks call it, and rank 0 uses the result.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from tutorial.mistakes.ranks import run_on_ranks


def log_mean_loss(rank: int) -> list[str]:
    """The error in which this rank ended, empty if none: the wrong way, the right way."""
    errors = []
    for reduces in (rank == 0, True):
        group: Any = dist.new_group(timeout=timedelta(seconds=3))
        loss = torch.tensor(2.0 + rank)
        try:
            if reduces:
                dist.all_reduce(loss, group=group)
            dist.barrier(group)  # stands for the next collective of the training loop
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors


if __name__ == "__main__":
    errors = run_on_ranks(log_mean_loss)
    for rank, (wrong, _) in enumerate(errors):
        print(f"rank {rank}: {wrong.split('. ')[0]}")
    print(f"wrong: {sum(wrong != '' for wrong, _ in errors)} ranks ended in an error")
    print(f"right: {sum(right != '' for _, right in errors)} ranks ended in an error")
