"""The two stages of lesson 12, and a step of them by torch.distributed.pipelining."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from tutorial.events import record


class Stage(nn.Module):
    """Rank 0: embeddings and the first block. Rank 1: the second block, the last norm and the head."""

    def __init__(self, gpt: Any, rank: int, world_size: int) -> None:
        if world_size != 2:
            raise ValueError(f"two stages need two processes, and there are {world_size}")
        super().__init__()
        self.rank, self.block, self.positions = rank, gpt.h[rank], gpt.positions
        self.wte = gpt.wte  # on both, because the head of this model is its embedding
        self.other = gpt.wpe if rank == 0 else gpt.ln_f

    def forward(self, x: Tensor) -> Tensor:
        """(B, T) tokens to (B, T, C) activations on rank 0, those to (B, T, V) logits on rank 1."""
        if self.rank == 0:
            return self.block(self.wte(x) + self.other.weight, self.positions())
        return F.linear(self.other(self.block(x, self.positions())), self.wte.weight)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@contextmanager
def compute(name: str, least_ms: float = 0.0) -> Iterator[None]:
    """Recorded, and made to take at least so long."""
    with record("compute", name):
        end = time.monotonic() + least_ms / 1000
        yield
        time.sleep(max(0.0, end - time.monotonic()))


def step_of_torch(stage: Stage, schedule: str, count: int) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A function that adds the gradients of a batch, and returns the micro-batches' losses on rank 1."""
    kind = ScheduleGPipe if schedule == "gpipe" else Schedule1F1B
    steps = kind(PipelineStage(stage, stage.rank, 2, torch.device("cpu")), count, loss_fn=mean_loss)

    def run_step(inputs: Tensor, targets: Tensor) -> list[Tensor]:
        losses: list[Tensor] = []
        if stage.rank == 0:
            steps.step(inputs)
        else:
            steps.step(target=targets, losses=losses)  # divides the gradients by the number of micro-batches
        return [loss.detach() / count for loss in losses]

    return run_step
