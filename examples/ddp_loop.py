"""A stock script for DDP with a DistributedSampler, changed so that kills do not change its result.

    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/ddp_loop.py

The last line of output, a hash of the weights, is the same for one to MICRO_BATCHES workers, whatever was
killed or stopped, on one kind of device. docs/any-loop.md explains the lines that are marked with (1) to (5).
This project must be on PYTHONPATH, or installed.
"""

import hashlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from mingpt.data import ElasticSampler
from mingpt.distributed import StopSignal, enable_determinism
from mingpt.parallel import ExactHook
from mingpt.snapshot import Checkpoint

STEPS, BATCH, MICRO_BATCHES, SAVE_EVERY = 300, 64, 8, 20


def main() -> None:
    dist.init_process_group("gloo")
    rank, workers = dist.get_rank(), dist.get_world_size()
    enable_determinism()  # (1)
    torch.manual_seed(0)
    images = torch.randn(2000, 64)
    data = TensorDataset(images, (images @ torch.randn(64, 10)).argmax(1))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    hook = ExactHook(model, MICRO_BATCHES)  # (2)
    model.register_comm_hook(hook, ExactHook.reduce)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    size = BATCH // MICRO_BATCHES
    sampler = ElasticSampler(  # (3)
        data, batch_size=BATCH, micro_batch_size=size, seed=0, num_replicas=workers, rank=rank
    )
    stop, checkpoint = StopSignal(), Checkpoint("ddp_loop", keep=2)  # (4)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    step = checkpoint.load(state) or 0
    sampler.seek(step * BATCH)
    batches = iter(DataLoader(data, batch_size=size, sampler=sampler))
    while step < STEPS:
        optimizer.zero_grad()
        for number in hook.share:  # (5)
            x, y = next(batches)
            model.require_backward_grad_sync = number == hook.share[-1]
            (F.cross_entropy(model(x), y) / MICRO_BATCHES).backward()
        optimizer.step()
        scheduler.step()
        step += 1
        is_told_to_stop = stop.agreed()
        if is_told_to_stop or step % SAVE_EVERY == 0 or step == STEPS:
            checkpoint.save(step, state)
        if is_told_to_stop:
            break
    checkpoint.wait()
    if rank == 0 and step == STEPS:
        content = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
        print("weights", hashlib.sha256(content).hexdigest())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
