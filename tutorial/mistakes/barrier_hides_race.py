"""Mistake: a barrier that does not wait for the thread that writes the snapshot.

    python -m tutorial.mistakes.barrier_hides_race

Rank 0 saves in a thread, every rank calls `barrier()`, and then every rank reads the snapshot. But a barrier
waits for ranks, not for their threads. With a fast disk the write is over in time, by luck. With a slow one
the ranks go on from the old snapshot, and nothing fails. Right: rank 0 joins its thread, then the barrier.
"""

import tempfile
from pathlib import Path
from threading import Timer

import torch.distributed as dist

from tutorial.mistakes.ranks import run_on_ranks


def save_and_read(rank: int, folder: str) -> list[int]:
    """The step in the snapshot that this rank reads: the wrong way, the right way."""
    steps = []
    for way in ("wrong", "right"):
        path = Path(folder) / way
        if rank == 0:
            path.write_text("100")
            thread = Timer(3, path.write_text, ["200"])  # 3 s stand for a slow disk
            thread.start()
            if way == "right":
                thread.join()
        dist.barrier()
        steps.append(int(path.read_text()))
    return steps


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        wrong, right = run_on_ranks(save_and_read, folder)[1]
    print(f"wrong: {wrong} is the step in the snapshot that the other rank reads")
    print(f"right: {right} is the step in the snapshot that the other rank reads")
