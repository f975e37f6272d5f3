"""The interface between the trainer and a way of training in parallel."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mingpt.distributed import DistributedContext

Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StrategySetup:
    """What a strategy is built from."""

    forward: Any  # (B, T) tokens and targets to the loss: a module, compiled perhaps
    parameters: Sequence[nn.Parameter]
    micro_batches_by_rank: Sequence[Sequence[int]]
    batch_shape: tuple[int, int]  # (B, T) of a micro-batch
    context: DistributedContext
    grads_are_static: bool  # the next backward pass overwrites the memory of these gradients (CUDA graphs)

    @property
    def micro_batches(self) -> int:
        """In a step, of all ranks together."""
        return sum(map(len, self.micro_batches_by_rank))


class Strategy(ABC):
    """One step is

        strategy.start_step()
        for micro_batch in strategy.my_micro_batches:
            with strategy.micro_batch(micro_batch):
                (strategy.forward(inputs, targets) * strategy.loss_scale).backward()
        strategy.finish_step()

    and then every `grad` is the mean over all micro-batches of the step, on all ranks. All ranks call
    everything.
    """

    loss_scale: float

    def __init__(self, setup: StrategySetup) -> None:
        self.setup = setup
        self.forward: Forward = setup.forward
        self.my_micro_batches = setup.micro_batches_by_rank[setup.context.rank]
        self.loss_scale = 1.0 / setup.micro_batches

    @abstractmethod
    def start_step(self) -> None:
        """Before the first micro-batch."""

    @abstractmethod
    def micro_batch(self, number: int) -> AbstractContextManager[None]:
        """Around the forward and backward pass of a micro-batch."""

    @abstractmethod
    def finish_step(self) -> None:
        """After the last micro-batch. Raises what kept ranks from exchanging gradients, often a lost peer."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to at most this norm (0: leave them); returns the norm before, a scalar."""
        return torch.nn.utils.clip_grad_norm_(self.setup.parameters, max_norm or math.inf)

    def full_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The full (unsharded) tensors of which this rank holds its part, valid until the next step."""
        return dict(tensors)

    @torch.no_grad()
    def load_full_state(self, tensors: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> None:
        """Copy this rank's part of the full tensors into its own. Raises KeyError if one is missing."""
        for name, tensor in tensors.items():
            tensor.copy_(full[name])
