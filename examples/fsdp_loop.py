"""A stock script for FSDP2 (`fully_shard`), changed so that kills do not change its result.

    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/fsdp_loop.py

The last line of output, a hash of the weights, is the same whatever was killed or stopped, for a fixed number
of workers. This project must be on PYTHONPATH, or installed.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from mingpt.distributed import StopSignal
from mingpt.snapshot import Checkpoint

STEPS, BATCH, SAVE_EVERY = 300, 64, 20


def main() -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = torch.randn(2000, 64)
    labels = (images @ torch.randn(64, 10)).argmax(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=dist.init_device_mesh("cpu", (workers,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    stop, checkpoint = StopSignal(), Checkpoint("fsdp_loop", keep=2)
    state = {"model": model, "optimizer": optimizer}
    step = checkpoint.load(state) or 0
    while step < STEPS:
        generator = torch.Generator().manual_seed(step)  # all ranks choose alike
        chosen = torch.randint(len(images), (BATCH,), generator=generator)[rank::workers]
        optimizer.zero_grad()
        F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        step += 1
        is_told_to_stop = stop.agreed()
        if is_told_to_stop or step % SAVE_EVERY == 0 or step == STEPS:
            checkpoint.save(step, state)
        if is_told_to_stop:
            break
    checkpoint.wait()
    if step == STEPS:
        content = b"".join(one.full_tensor().numpy().tobytes() for one in model.state_dict().values())
        if rank == 0:
            print("weights", hashlib.sha256(content).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
