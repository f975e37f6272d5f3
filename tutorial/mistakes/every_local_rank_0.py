"""Mistake: the local rank 0 of every node saves the snapshot.

    python -m tutorial.mistakes.every_local_rank_0

With `if local_rank == 0` one rank of every node saves, and on a shared folder all of them write one file. The
node that comes later empties the finished file as it opens it. If the run dies then, nothing is left.
(Renaming a finished file is no help: both write the same one before.) Right: `if rank == 0`, one rank in all.
Here two ranks of one machine play two nodes with one rank each.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from tutorial.mistakes.ranks import run_on_ranks


def save(rank: int, folder: str) -> list[int]:
    """How long the finished snapshot is when node 1 has come to the save: the wrong way, the right way."""
    node, local_rank, sizes = rank, 0, []  # as torchrun sets GROUP_RANK and LOCAL_RANK there
    for way, saves in (("wrong", local_rank == 0), ("right", rank == 0)):
        path = Path(folder) / way
        if saves and node == 0:
            torch.save(torch.zeros(10_000), path)
        dist.barrier()  # node 0 has finished
        with path.open("wb" if saves and node == 1 else "rb"):
            dist.barrier()  # both have opened the file, to write it or to read it
            sizes.append(path.stat().st_size)
            dist.barrier()  # both have looked
    return sizes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = run_on_ranks(save, folder)[0]
    print(f"wrong: {wrong} bytes in the finished snapshot when the second node has come to the save")
    print(f"right: {right} bytes in the finished snapshot when the second node has come to the save")
