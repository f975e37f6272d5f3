"""Mistake: a file for each rank's part of a sharded model, when another number of ranks resumes.

    python -m tutorial.mistakes.part_of_each_rank

On three ranks instead of two a part has fewer rows than the one in the rank's file, and rank 2 has no file.
Right: torch.distributed.checkpoint (DCP), whose folder has an index of which rows are in which file.
"""

import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

from tutorial.mistakes.ranks import run_on_ranks

WEIGHT = torch.arange(1.0, 64 * 64 + 1).view(64, 64)


def save(rank: int, folder: str) -> None:
    part = distribute_tensor(WEIGHT, DeviceMesh("cpu", range(2)), [Shard(0)])  # half of the rows, as in FSDP
    torch.save(part.to_local(), f"{folder}/{rank}.pt")
    dcp.save({"weight": part}, checkpoint_id=folder)


def load(rank: int, folder: str) -> list[int]:
    parts = [distribute_tensor(0 * WEIGHT, DeviceMesh("cpu", range(3)), [Shard(0)]) for _ in range(2)]
    try:
        parts[0].to_local().copy_(torch.load(f"{folder}/{rank}.pt"))
    except (FileNotFoundError, RuntimeError) as error:
        print(f"rank {rank}: {error}", flush=True)
    dcp.load({"weight": parts[1]}, checkpoint_id=folder)
    return [int((part.full_tensor() == WEIGHT).sum()) for part in parts]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save, folder)
        wrong, right = run_on_ranks(load, folder, world_size=3)[0]
    print(f"wrong: {wrong} elements of the weight restored\nright: {right} elements of the weight restored")
