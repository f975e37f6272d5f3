"""Strategies with all weights on each rank, `trainer.parallel=ddp`: their base class, and DDPReduction.

With `shard_optimizer` each rank updates its rows of each parameter, and all ranks gather the updated rows, a
bucket of parameters at a time. The bits of a sum by DistributedDataParallel may depend on the number of
workers; the bits of exact.py's sum do not.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mingpt.base import events
from mingpt.parallel.strategy import Forward, Strategy, StrategySetup, allocate, digest

# DistributedDataParallel's default. A smaller collective takes more time to start than to send its bytes.
BUCKET_BYTES = 25 << 20
# The argument's name before torch 2.13 is broadcast_buffers.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


def fits_one_bucket(nbytes: int) -> bool:
    return nbytes <= BUCKET_BYTES


def make_buckets(weights: Mapping[str, Tensor]) -> list[list[str]]:
    """Return the parameters' names, bucket by bucket, from the last parameter to the first.

    A backward pass usually computes gradients in this order. A bucket takes no more parameters once it has
    BUCKET_BYTES.
    """
    buckets: list[list[str]] = [[]]
    size = 0
    for name in reversed(list(weights)):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(name)
        size += weights[name].nbytes
    return buckets


def gradient_of(weight: Tensor) -> Tensor:
    """Return `weight.grad`. If that is None, first set `weight.grad` to zeros."""
    if weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    return weight.grad


def backward_zeros(weights: Iterable[Tensor]) -> None:
    """Run a backward pass that adds zeros to the gradients of `weights`.

    DistributedDataParallel waits for a gradient of each weight, and `weights` took no part in the loss. DDP's
    find_unused_parameters would be another way, but its buckets, and so the bits, may be different.
    """
    sums = [weight.sum() for weight in weights]
    if sums:
        torch.stack(sums).sum().mul(0.0).backward()  # type: ignore[no-untyped-call]


class WholeWeights(Strategy):
    """The base of DDPReduction and ExactReduction, in which each rank holds all weights."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        allocate(setup.model, self.context.device)
        self.all_weights = dict(setup.model.named_parameters())
        self.weights = {name: self.all_weights[name] for name in self.trained}
        self.updates_are_sharded = setup.shard_optimizer and self.world_size > 1
        self.buckets = make_buckets(self.weights)

    def held_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.all_weights.items()}

    def pieces(self) -> dict[str, Tensor]:
        return self.own_rows({name: weight.detach() for name, weight in self.weights.items()})

    def own_rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return those rows of `tensors` that this rank updates; all rows if updates are not sharded."""
        if not self.updates_are_sharded:
            return tensors
        return {name: self.take_rows(name, tensor, self.rank) for name, tensor in tensors.items()}

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[dict[str, Tensor]]:
        found: dict[str, Tensor] = {}
        yield found
        for name, weight in self.weights.items():
            found[name] = digest(gradient_of(weight))
            weight.grad = None

    def gradients(self) -> dict[str, Tensor]:
        return self.own_rows({name: gradient_of(weight) for name, weight in self.weights.items()})

    def finish_update(self) -> None:
        for weight in self.weights.values():
            weight.grad = None
        if self.updates_are_sharded:
            for names in self.buckets:
                self.gather_weights(names)

    @torch.no_grad()
    def gather_weights(self, names: list[str]) -> None:
        """Copy each rank's updated rows of the parameters `names` to all ranks, in place. Collective."""
        counts = [self.rows.numel(name) for name in names]
        sizes = [sum(of_rank) for of_rank in zip(*counts, strict=True)]
        own = [self.take_rows(name, self.weights[name], self.rank).flatten() for name in names]
        gathered = self.context.transport.all_gather_parts(own, sizes, at_once=True)
        for rank, vector in enumerate(gathered):
            if rank == self.rank:
                continue
            parts = vector.split([count[rank] for count in counts])
            for name, part in zip(names, parts, strict=True):
                rows = self.take_rows(name, self.weights[name], rank)
                rows.copy_(part.view(rows.shape))


class DDPReduction(WholeWeights):
    """A strategy that sums gradients by DistributedDataParallel's all-reduce, `trainer.reduction=fast`.

    Without a launcher there is one worker, whose gradients accumulate in `grad`.
    """

    no_sync: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # in it, DDP does not reduce

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.arrived = set[Tensor]()  # the weights that took part in the last backward pass
        for weight in self.weights.values():
            weight.register_post_accumulate_grad_hook(self.arrived.add)

    def prepare(self, forward: Forward) -> None:
        self.forward = forward
        if self.context.launch.is_distributed:
            # The buffers are constants: they need no broadcast before each forward pass.
            options: dict[str, Any] = {"gradient_as_bucket_view": True, SYNC_BUFFERS: False}
            ddp = DistributedDataParallel(forward, **options)  # type: ignore[arg-type]
            self.forward, self.no_sync = ddp, ddp.no_sync
            self.loss_weight *= self.world_size  # DDP takes the mean over the ranks

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        is_last = number == self.my_micro_batches[-1]
        self.arrived.clear()
        if is_last:
            events.emit("reduction_start")
        with contextlib.nullcontext() if is_last else self.no_sync():
            yield

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[dict[str, Tensor]]:
        with self.no_sync(), super().unreduced() as found:
            yield found

    def finish_step(self) -> None:
        if not self.my_micro_batches:
            self.arrived.clear()
            self.dummy_backward()
        backward_zeros(weight for weight in self.weights.values() if weight not in self.arrived)
