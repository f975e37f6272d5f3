"""Fit a line on nodes of which any may die, join or leave, with torch alone (docs/anynode.md).

    python -m anynode --nnodes 2:3 --nproc 1 --rdzv PLACE --local_addr ADDRESS -- any_host_may_die.py FOLDER

FOLDER is on each node's own disk, and keeps the state. When nodes die or join, all workers are started again,
and go on from the newest state of their nodes.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

path = Path(sys.argv[1]) / "state.pt"
path.parent.mkdir(parents=True, exist_ok=True)
dist.init_process_group("gloo", timeout=timedelta(seconds=10))  # a node that is cut off costs this time
rank, workers = dist.get_rank(), dist.get_world_size()

# The number of steps that this node's state has seen, and the line's slope and offset.
state = torch.load(path) if path.exists() else torch.zeros(3)
steps = [torch.zeros(1) for _ in range(workers)]
dist.all_gather(steps, state[:1])
dist.broadcast(state, src=int(torch.cat(steps).argmax()))
if rank == 0:
    print(f"round {os.environ['ANYNODE_ROUND']}: {workers} workers, from step {int(state[0])}", flush=True)
while state[0] < 600:
    torch.manual_seed(1000 * int(state[0]) + rank)
    x = torch.randn(256)
    error = state[1] * x + state[2] - (3.0 * x - 2.0)
    gradient = torch.stack([(error * x).mean(), error.mean()]) / workers
    dist.all_reduce(gradient)
    state[1:] -= 0.1 * gradient
    state[0] += 1
    time.sleep(0.05)  # so that there is time to kill a node
    if os.environ["LOCAL_RANK"] == "0":
        torch.save(state, path.with_suffix(".partial"))
        os.replace(path.with_suffix(".partial"), path)
dist.barrier()  # a worker that exits with 0 says that the job is finished
if rank == 0:
    print(f"slope {state[1]:.3f}, offset {state[2]:.3f}", flush=True)
