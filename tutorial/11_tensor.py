"""Lesson 11: tensor parallelism. Each rank holds some heads and some of the MLP's neurons of every block.

    torchrun --standalone --nproc_per_node=2 -m tutorial.11_tensor

With --torch at the end, torch.distributed.tensor.parallel cuts. All ranks read the same windows.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tutorial.common import LEARNING_RATE, STEPS, batch_of
from tutorial.splitting import SavedBytes, finish, held, report, start

SENT: list[int] = []  # bytes that this rank sends, a number for each all-reduce


def all_reduce(tensor: Tensor) -> Tensor:
    total, world_size = tensor.clone(), dist.get_world_size()
    dist.all_reduce(total)
    SENT.append(2 * total.nbytes * (world_size - 1) // world_size)
    return total


class Copy(torch.autograd.Function):
    """Into a half-block: the input is the same on all ranks; its gradient is the sum of theirs."""

    forward = staticmethod(lambda ctx, x: x.view_as(x))
    backward = staticmethod(lambda ctx, gradient: all_reduce(gradient))


class Sum(torch.autograd.Function):
    """Out of a half-block: the output is the sum of the ranks' outputs; its gradient is the same on all."""

    forward = staticmethod(lambda ctx, x: all_reduce(x))
    backward = staticmethod(lambda ctx, gradient: gradient)


def piece(tensor: Tensor, dim: int) -> nn.Parameter:
    """This rank's part of a weight or bias, cut along a dimension."""
    return nn.Parameter(tensor.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone())


class ColumnParallel(nn.Module):
    """A part of the outputs of a linear layer. A weight is (outputs, inputs), so its rows are cut."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = piece(layer.weight, 0), piece(layer.bias, 0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(Copy.apply(x), self.weight, self.bias)


class RowParallel(nn.Module):
    """A linear layer of which this rank has a part of the inputs. The bias is added once, to the sum."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = piece(layer.weight, 1), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(F.linear(x, self.weight)) + self.bias


def heads_together(c_attn: nn.Linear, world_size: int) -> None:
    """Its rows are all queries, all keys, all values: make them the queries, keys, values of each rank."""
    for parameter in c_attn.parameters():
        rows = parameter.detach().unflatten(0, (3, world_size, -1)).transpose(0, 1)  # (W, 3, C / W, ...)
        parameter.data = rows.flatten(0, 2)


def cut(block: Any, by_torch: bool, world_size: int) -> None:
    if block.attn.n_head % world_size:
        raise ValueError(f"{block.attn.n_head} heads cannot be shared evenly by {world_size} ranks")
    heads_together(block.attn.c_attn, world_size)
    block.attn.n_head //= world_size
    if by_torch:
        columns, rows = ColwiseParallel(), RowwiseParallel()
        plan = {"attn.c_attn": columns, "attn.c_proj": rows, "mlp.c_fc": columns, "mlp.c_proj": rows}
        parallelize_module(block, dist.init_device_mesh("cpu", (world_size,)), plan)
        return
    block.attn.c_attn, block.mlp.c_fc = ColumnParallel(block.attn.c_attn), ColumnParallel(block.mlp.c_fc)
    block.attn.c_proj, block.mlp.c_proj = RowParallel(block.attn.c_proj), RowParallel(block.mlp.c_proj)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="cut by torch.distributed.tensor.parallel")
    by_torch = parser.parse_args().torch
    rank, world_size, gpt, dataset = start()
    for block in gpt.h:
        cut(block, by_torch, world_size)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)
    saved = SavedBytes(gpt)
    with CommDebugMode() as collectives, saved:
        gpt(*dataset[batch_of(1)])[1].backward()  # a pass that is only counted
    count, sent = collectives.get_total_counts(), f", {sum(SENT):,} bytes," if SENT else ""
    began = time.monotonic()
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        _, loss = gpt(*dataset[batch_of(step)])  # the whole batch, on all ranks
        loss.backward()
        optimizer.step()
        if rank == 0:
            report(step, loss)
    ms = 1000 * (time.monotonic() - began) / STEPS
    figures = f"rank {rank} sends {count} all-reduces{sent} in a step of about {ms:.0f} ms"
    finish(f"{figures}\n{held(gpt, optimizer, saved.total)}", loss.detach())


if __name__ == "__main__":
    main()
