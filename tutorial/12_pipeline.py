"""Lesson 12: pipeline parallelism. Each rank holds a stage of the model, and micro-batches pass through both.

    torchrun --standalone --nproc_per_node=2 -m tutorial.12_pipeline

--stage_ms 48 declares that a stage takes 48 ms for the forward pass of a batch and 96 for the backward pass.
"""

import argparse
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tutorial.common import LEARNING_RATE, STEPS, batch_of
from tutorial.events import EVENTS, record, save
from tutorial.splitting import SavedBytes, finish, held, report, start
from tutorial.stages import Stage, compute, mean_loss, step_of_torch

SENT: list[int] = []  # bytes, a number for each send and all-reduce
SAVED: list[list[int]] = [[]]  # after each forward pass: bytes saved, by micro-batch that is held


def order_of(schedule: str, count: int, stages_behind: int) -> list[tuple[str, int]]:
    forward, backward = ([(name, number) for number in range(count)] for name in ("forward", "backward"))
    first = count if schedule == "gpipe" else min(stages_behind, count)
    turns = zip(forward[first:], backward, strict=False)  # 1F1B: one forward, one backward
    return [*forward[:first], *(turn for pair in turns for turn in pair), *backward[count - first :]]


def receive(name: str, rank: int, shape: torch.Size) -> Tensor:
    tensor = torch.empty(shape)
    with record("wait", name):
        dist.recv(tensor, src=1 - rank)
    return tensor


def send(name: str, rank: int, tensor: Tensor) -> Any:
    """Returns at once. If each rank waited until the other received, neither would come to receive."""
    SENT.append(tensor.nbytes)
    with record("send", name):
        return dist.isend(tensor, dst=1 - rank)


def run_step(stage: Stage, order: list[tuple[str, int]], batches: list[Any], stage_ms: float) -> list[Tensor]:
    """Add the gradients of the batch to the stage's. Returns the micro-batches' losses on rank 1."""
    rank, count, sends, losses = stage.rank, len(batches), [], []
    between: dict[int, tuple[Any, Tensor, SavedBytes]] = {}  # the two passes of a micro-batch
    shape = torch.Size([*batches[0][0].shape, stage.wte.embedding_dim])  # (B / M, T, C)
    for kind, number in order:
        name = f"{kind} {number + 1}"
        if kind == "forward":
            inputs, targets = batches[number]
            x = inputs if rank == 0 else receive(name, rank, shape).requires_grad_()
            saved = SavedBytes(stage)
            with compute(name, stage_ms / count), saved:
                y = stage(x) if rank == 0 else mean_loss(stage(x), targets) / count
            between[number] = x, y, saved
            SAVED.append([saved.total for _, _, saved in between.values()])
            if rank == 0:
                sends.append(send(name, rank, y.detach()))
            else:
                losses.append(y.detach())
        else:
            x, y, _ = between.pop(number)
            gradient = receive(name, rank, shape) if rank == 0 else None
            with compute(name, 2 * stage_ms / count):
                y.backward(gradient)
            if rank == 1:
                sends.append(send(name, rank, x.grad))
    with record("wait", "sends"):
        for work in sends:
            work.wait()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true", help="by torch.distributed.pipelining")
    parser.add_argument("--micro_batches", type=int, default=4)
    parser.add_argument("--schedule", choices=["gpipe", "1f1b"], default="gpipe")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--stage_ms", type=float, default=0.0)
    parser.add_argument("--events", help="a file for the events of the last step")
    args = parser.parse_args()
    rank, world_size, gpt, dataset = start()
    stage, count, waited_s = Stage(gpt, rank, world_size), args.micro_batches, 0.0
    optimizer = torch.optim.AdamW(stage.parameters(), lr=LEARNING_RATE)
    by_torch = step_of_torch(stage, args.schedule, count) if args.torch else None
    order, began = order_of(args.schedule, count, 1 - rank), time.monotonic()
    for step in range(1, args.steps + 1):
        EVENTS.clear()
        SENT.clear()
        optimizer.zero_grad()
        if by_torch:
            losses = by_torch(*dataset[batch_of(step)])
        else:
            batches = [dataset[part] for part in batch_of(step).chunk(count)]
            losses = run_step(stage, order, batches, args.stage_ms)
        with record("wait", "wte"):  # its gradient is the sum of that of the embedding and that of the head
            SENT.append(stage.wte.weight.grad.nbytes)
            dist.all_reduce(stage.wte.weight.grad)
        with compute("optimizer"):
            optimizer.step()
        waited_s += sum(event["end"] - event["begin"] for event in EVENTS if event["what"] == "wait")
        loss = torch.stack(losses).sum() if losses else None
        report(step, loss)  # rank 1 has it
    total_s = time.monotonic() - began
    figures = f"rank {rank}: about {1000 * total_s / step:.0f} ms a step"
    if not args.torch:  # what torch sends is not counted here
        figures += f", sends {sum(SENT):,} bytes, waits about {waited_s / total_s:.0%} of the time"
        figures += f", holds at most {max(map(len, SAVED))} micro-batches"
    if args.events:
        save(args.events, f"Two stages, {args.schedule}, {count} micro-batches")
    finish(f"{figures}\n{held(stage, optimizer, max(map(sum, SAVED)))}", loss)


if __name__ == "__main__":
    main()
