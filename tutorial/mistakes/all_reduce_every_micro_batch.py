"""Mistake: gradient accumulation with DistributedDataParallel, without `no_sync`.

    python -m tutorial.mistakes.all_reduce_every_micro_batch

DDP all-reduces the gradients in every backward pass, though they are used only after the last one. A step
has the same gradient, and sends it once per micro-batch. Right: all but the last backward pass in `no_sync`.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tutorial.mistakes.ranks import run_on_ranks


def count_and_reduce(sizes: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    sizes.append(bucket.buffer().nbytes)
    dist.all_reduce(bucket.buffer().div_(dist.get_world_size()))
    reduced = torch.futures.Future[Tensor]()
    reduced.set_result(bucket.buffer())
    return reduced


def train_step(rank: int, no_sync: bool) -> tuple[list[int], Tensor]:
    torch.manual_seed(1337)
    model, sizes = nn.parallel.DistributedDataParallel(nn.Linear(64, 64, bias=False)), list[int]()
    model.register_comm_hook(sizes, count_and_reduce)
    for number, inputs in enumerate(torch.randn(2, 8, 16, 64)[rank]):  # 8 micro-batches
        with model.no_sync() if no_sync and number < 7 else nullcontext():
            (model(inputs).square().mean() / 8).backward()
    return sizes, model.module.weight.grad  # the bytes of each all-reduce, and the gradient


if __name__ == "__main__":
    (wrong, gradient), (right, same) = (run_on_ranks(train_step, no_sync)[0] for no_sync in (False, True))
    print(f"gradients differ by {(gradient - same).norm():.6f} at a norm of {same.norm():.6f}")
    print(f"wrong: {len(wrong)} all-reduces in a step")
    print(f"right: {len(right)} all-reduces in a step")
