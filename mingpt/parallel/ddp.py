"""Strategies in which each rank holds all weights: their base, and DistributedDataParallel, `reduction=fast`.

With `shard_optimizer` each rank updates its rows of each parameter, and all ranks gather them, a bucket of
parameters at a time. The bits of DistributedDataParallel's reduction depend on the number of workers; the
bits of exact.py's reduction do not.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mingpt.base import events
from mingpt.distributed.shared_memory import SharedMemory
from mingpt.parallel.strategy import Forward, Strategy, StrategySetup, digest

# As in DistributedDataParallel: a smaller collective takes more time to start than to move its bytes.
BUCKET_BYTES = 25 << 20
# broadcast_buffers is the name before torch 2.13.
ARGUMENTS = inspect.signature(DistributedDataParallel).parameters
SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in ARGUMENTS else "broadcast_buffers"


def fits_one_bucket(nbytes: int) -> bool:
    return nbytes <= BUCKET_BYTES


def make_buckets(parameters: Sequence[Tensor]) -> list[list[int]]:
    """Return the parameters' indices, bucket by bucket, from the last parameter to the first.

    A backward pass likely completes gradients in this order. A bucket is closed once it holds BUCKET_BYTES,
    so that a large parameter shares its bucket with small ones.
    """
    buckets: list[list[int]] = [[]]
    size = 0
    for number in reversed(range(len(parameters))):
        if size >= BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += parameters[number].nbytes
    return buckets


def allocate(model: nn.Module, device: torch.device) -> None:
    """Replace parameters and buffers on meta by uninitialised ones on `device`. Shared ones stay shared."""
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if weight.is_meta:
                if weight not in made:
                    made[weight] = nn.Parameter(empty_like(weight, device))
                setattr(module, name, made[weight])
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_meta:
                if buffer not in made:
                    made[buffer] = empty_like(buffer, device)
                setattr(module, name, made[buffer])


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialised tensor like `tensor` on `device`.

    For a meta tensor torch.empty_like would import sympy, which takes a fifth of torch's import time.
    """
    if type(tensor) in (Tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return torch.empty_like(tensor, device=device)  # a DTensor of FSDP2, which has more than a shape


class WholeWeights(Strategy):
    """The base of DDPReduction and ExactReduction, in which each rank holds all weights."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        allocate(setup.model, self.context.device)
        self.weights = dict(setup.model.named_parameters())
        self.names, self.parameters = list(self.weights), list(self.weights.values())
        self.updates_are_sharded = setup.shard_optimizer and self.world_size > 1
        self.buckets = make_buckets(self.parameters)
        self.memory: SharedMemory | None = None  # of all ranks, if the strategy and the system share any

    def held_weights(self) -> dict[str, Tensor]:
        return {name: weight.detach() for name, weight in self.weights.items()}

    def pieces(self) -> dict[str, Tensor]:
        return self.own_rows(self.held_weights())

    def own_rows(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of whole tensors that this rank updates: all rows, unless updates are sharded."""
        if not self.updates_are_sharded:
            return tensors
        return {name: tensor[self.my_rows(name)] for name, tensor in tensors.items()}

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[dict[str, Tensor]]:
        found: dict[str, Tensor] = {}
        yield found
        for name, weight in self.weights.items():
            assert weight.grad is not None, "every parameter takes part in every micro-batch"
            found[name] = digest(weight.grad)
            weight.grad = None

    def gradients(self) -> dict[str, Tensor]:
        whole = {name: weight.grad for name, weight in self.weights.items() if weight.grad is not None}
        assert whole.keys() == self.weights.keys(), "every parameter takes part in every micro-batch"
        return self.own_rows(whole)

    def finish_update(self) -> None:
        for weight in self.parameters:
            weight.grad = None
        if self.updates_are_sharded:
            for bucket in self.buckets:
                self.gather_weights([self.names[number] for number in bucket])

    @torch.no_grad()
    def gather_weights(self, names: list[str]) -> None:
        """Copy each rank's updated rows of these parameters to all ranks, in place. Collective."""
        counts = [self.rows.numel(name) for name in names]
        sizes = [sum(count[rank] for count in counts) for rank in range(self.world_size)]
        pieces = [self.weights[name][self.my_rows(name)].flatten() for name in names]
        if self.memory is not None:
            self.memory.begin(max(sizes) * pieces[0].element_size())
            torch.cat(pieces, out=self.memory.of(self.rank, pieces[0].dtype, 0, sizes[self.rank]))
            self.memory.barrier()
            gathered = [self.memory.of(rank, pieces[0].dtype, 0, size) for rank, size in enumerate(sizes)]
        else:
            padding = pieces[0].new_zeros(max(sizes) - sizes[self.rank])
            gathered = list(self.context.all_gather(torch.cat([*pieces, padding])))
        for rank, row in enumerate(gathered):
            parts = row[: sizes[rank]].split([count[rank] for count in counts])
            for name, count, part in zip(names, counts, parts, strict=True):
                if rank != self.rank:
                    first = sum(count[:rank])
                    self.weights[name].view(-1)[first : first + len(part)] = part
        if self.memory is not None:
            self.memory.end()


class DDPReduction(WholeWeights):
    """Sums gradients by DistributedDataParallel's all-reduce; without a launcher, they only accumulate."""

    ddp: DistributedDataParallel | None = None

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward = forward
        if self.context.launch.is_distributed:
            # The buffers are constants: they need no broadcast before each forward pass.
            options: dict[str, Any] = {"gradient_as_bucket_view": True, SYNC_BUFFERS: False}
            self.ddp = DistributedDataParallel(forward, **options)  # type: ignore[arg-type]
            self.forward = self.ddp
            self.loss_weight *= self.world_size  # DDP takes the mean over the ranks

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        is_last = number == self.my_micro_batches[-1]
        if is_last:
            events.emit("reduction_start")
        with contextlib.nullcontext() if is_last or self.ddp is None else self.ddp.no_sync():
            yield

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[dict[str, Tensor]]:
        with (
            contextlib.nullcontext() if self.ddp is None else self.ddp.no_sync(),
            super().unreduced() as found,
        ):
            yield found

    def finish_step(self) -> None:
        if not self.my_micro_batches and self.ddp is not None:
            self.dummy_backward()
