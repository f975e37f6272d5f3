"""FSDP2, `trainer.parallel=fsdp`: each rank holds its rows of every weight, gradient and optimizer state.

A block's weights are gathered for its forward and its backward pass and freed after each (without
`trainer.fsdp_reshard` after the backward pass only), so all ranks pass through the blocks together. They take
micro-batches in turns, in rounds, and a rank without a micro-batch in the last round computes a dummy that is
not counted. After a block's backward pass its gradients are reduced and scattered. A unit is what is gathered
and scattered at once: a block, the weights outside of blocks, or a model that fits one bucket of ddp.py.

`reduction=exact` replaces FSDP2's reduce-scatter by an all-to-all: each rank receives its rows of all ranks'
gradients, and adds them up along the tree of tree.py. ExactReduction gives the same bits.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.base import events
from mingpt.distributed.shared_memory import SharedMemory
from mingpt.parallel.ddp import allocate, fits_one_bucket
from mingpt.parallel.exact import add_lists
from mingpt.parallel.strategy import Forward, Strategy, StrategySetup, digest
from mingpt.parallel.tree import PartialSums, push

PAGE = 4096
# reduce_scatter_tensor is the name before torch 2.13.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class FSDPReduction(Strategy):
    """FSDP2 with its own reduce-scatter, `trainer.reduction=fast`.

    Its collectives have a process group of their own, so that they may run beside those of another thread.
    """

    takes_turns = weights_are_sharded = updates_are_sharded = True

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.group = make_group(self.context.launch.is_distributed, setup.timeout_s)
        self.units: list[Any] = [setup.model]  # the model itself holds the weights outside of blocks
        if not fits_one_bucket(sum(weight.nbytes for weight in setup.model.parameters())):
            self.units = [*setup.blocks, setup.model]
        self.shard()
        allocate(setup.model, self.context.device)
        for unit in self.units:  # afterwards the unit's parameters stay the same objects
            unit.unshard()
            unit.reshard()
        self.weights = dict(setup.model.named_parameters())
        self.rounds = max(map(len, setup.micro_batches_by_rank))
        self.found: dict[str, Tensor] | None = None  # digests of gradients that are not counted
        for number, unit in enumerate(self.units):
            unit.set_custom_reduce_scatter(self.make_scatter(number))

    def make_scatter(self, number: int) -> "ReduceScatter":
        """Return the reduce-scatter for the gradients of unit `number`."""
        return ReduceScatter(self, number)

    def shard(self) -> None:
        # These imports take 0.6 s, which only runs with fsdp should pay.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = DeviceMesh.from_group(self.group, self.context.device.type)
        policy = MixedPrecisionPolicy()
        if self.setup.param_dtype:
            policy = MixedPrecisionPolicy(param_dtype=self.setup.param_dtype, reduce_dtype=torch.float32)
        for unit in self.units:
            is_root = unit is self.setup.model
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=self.setup.reshard and not is_root, mp_policy=policy
            )

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward = forward
        self.loss_weight *= self.world_size  # FSDP2 takes the mean over the ranks

    def pieces(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: local(weight) for name, weight in self.weights.items()}

    def held_weights(self) -> dict[str, Tensor]:
        return self.pieces()

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        if number // self.world_size == self.rounds - 1:
            events.emit("reduction_start")
        yield

    def finish_step(self) -> None:
        if len(self.my_micro_batches) < self.rounds:
            self.dummy_backward()

    def any(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        flags = torch.tensor([float(flag)], device=self.context.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.group)
        return bool(flags.item())

    @contextlib.contextmanager
    def unreduced(self) -> Iterator[dict[str, Tensor]]:
        found: dict[str, Tensor] = {}
        self.found = found
        yield found
        self.found = None
        if self.world_size == 1:  # then FSDP2 exchanges nothing
            found |= {name: digest(gradient) for name, gradient in self.gradients().items()}
        self.finish_update()

    def note_digest(self, number: int, gradients: Tensor) -> None:
        """Inside `unreduced`, record the digest of this rank's gradients of unit `number`."""
        if self.found is not None:
            is_model = self.units[number] is self.setup.model  # or the weights outside of blocks
            self.found["the model" if is_model else f"block {number}"] = digest(gradients)

    def gradients(self) -> dict[str, Tensor]:
        gradients = {
            name: local(weight.grad) for name, weight in self.weights.items() if weight.grad is not None
        }
        assert gradients.keys() == self.weights.keys(), "every parameter takes part in every micro-batch"
        return gradients

    def finish_update(self) -> None:
        for weight in self.weights.values():
            weight.grad = None


class ExactFSDPReduction(FSDPReduction):
    """FSDP2 with a sum along the tree. FSDP2 itself adds nothing: it gets the sum in the last round only."""

    def __init__(self, setup: StrategySetup) -> None:
        memory = setup.context.connect_memory(setup.timeout_s)
        self.areas = Areas(memory) if memory else None
        self.scatters: list[TreeReduceScatter] = []
        super().__init__(setup)
        self.first = 0  # the number of rank 0's micro-batch in the round under way
        self.partial_sums: PartialSums[list[Tensor]] = []  # if there is a single rank
        for unit in self.units:
            if self.areas:
                unit.set_custom_all_gather(SharedAllGather(self.areas))
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def make_scatter(self, number: int) -> "ReduceScatter":
        self.scatters.append(TreeReduceScatter(self, number))
        return self.scatters[number]

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward = forward

    def start_step(self, loss_scale: float = 1.0) -> None:
        super().start_step(loss_scale)
        self.partial_sums = []
        for scatter in self.scatters:
            scatter.partial_sums = []

    @property
    def is_last_round(self) -> bool:
        return self.first + self.world_size >= self.setup.micro_batches

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self.begin_round(number // self.world_size)
        yield
        if self.world_size == 1:  # then FSDP2 exchanges nothing
            gradients = list(self.gradients().values())
            push(self.partial_sums, 0, number, gradients, self.setup.micro_batches, add_lists)
            if self.is_last_round:
                events.emit("reduction_start")
                ((_, _, total),) = self.partial_sums
                for gradient, piece in zip(gradients, total, strict=True):
                    if gradient is not piece:
                        gradient.copy_(piece)

    def begin_round(self, number: int) -> None:
        self.first = number * self.world_size
        self.finish_update()  # frees FSDP2's outputs of the round before

    def finish_step(self) -> None:
        if len(self.my_micro_batches) < self.rounds:
            self.begin_round(self.rounds - 1)
            self.dummy_backward()


class Areas:
    """Shared memory for FSDP2, in three areas: weights are gathered in two in turns, gradients lie in one.

    A rank enters a gather only after it has copied the weights of the previous gather out of their area. So
    once all ranks are in a gather, the area of the previous one is free: two areas suffice.
    """

    GATHERING, GRADIENTS, COUNT = (0, 1), 2, 3

    def __init__(self, memory: SharedMemory) -> None:
        self.memory = memory
        self.nbytes = 0  # of an area
        self.turn = 0

    def begin(self, nbytes: int, area: int) -> int:
        """Give areas at least `nbytes` bytes on all ranks; return the first byte of `area`. Collective."""
        # Larger areas need new segments; weights that were gathered ahead stay in the old segments.
        pages = max(self.nbytes // PAGE, -(-nbytes // PAGE))
        self.memory.begin(self.COUNT * pages * PAGE)
        self.nbytes = self.memory.capacity // self.COUNT // PAGE * PAGE
        return area * self.nbytes

    def begin_gathering(self, nbytes: int) -> int:
        self.turn = (self.turn + 1) % len(self.GATHERING)
        return self.begin(nbytes, self.GATHERING[self.turn])


class SharedAllGather:
    """The all-gather that FSDP2 calls for a unit: all ranks write to rank 0's segment."""

    def __init__(self, areas: Areas) -> None:
        self.areas = areas

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        count = math.prod(size)
        first_byte = self.areas.begin_gathering(count * dtype.itemsize)
        return self.areas.memory.of(0, dtype, first_byte, count).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Wait for all ranks. FSDP2 has copied this rank's input to its place in the shared output."""
        self.areas.memory.barrier()


class ReduceScatter:
    """The reduce-scatter that FSDP2 calls after the backward pass of unit `number` of `strategy.units`."""

    def __init__(self, strategy: FSDPReduction, number: int) -> None:
        self.strategy, self.number = strategy, number

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduce the ranks' `input_tensor`, whole gradients, to this rank's rows, in `output_tensor`."""
        self.strategy.note_digest(self.number, input_tensor)
        reduce_scatter_single(output_tensor, input_tensor, op=op, group=group)


class TreeReduceScatter(ReduceScatter):
    """A reduce-scatter with a sum along the tree."""

    strategy: "ExactFSDPReduction"

    def __init__(self, strategy: "ExactFSDPReduction", number: int) -> None:
        super().__init__(strategy, number)
        self.partial_sums: PartialSums[Tensor] = []
        self.first_byte: int | None = None  # of the input, if it is in shared memory

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate the input, in shared memory if there is any; at the second call allocate the output."""
        areas, count = self.strategy.areas, math.prod(size)
        if areas is None or self.first_byte is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        self.first_byte = areas.begin(count * dtype.itemsize, areas.GRADIENTS)
        return areas.memory.of(self.strategy.rank, dtype, self.first_byte, count).view(*size)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        strategy = self.strategy
        strategy.note_digest(self.number, input_tensor)
        counts = strategy.found is None
        if counts and strategy.is_last_round:
            events.emit("reduction_start")
        chunks = self.exchange(input_tensor, group)
        if counts:
            self.add(chunks, output_tensor)
        else:
            output_tensor.zero_()
        if strategy.areas is not None:
            strategy.areas.memory.end()

    def add(self, chunks: Sequence[Tensor], output_tensor: Tensor) -> None:
        """Add a round's chunks, by rank, to the partial sums; in the last round, write the sum out."""
        strategy = self.strategy
        count = strategy.setup.micro_batches
        for rank, chunk in enumerate(chunks):
            number = strategy.first + rank
            if number < count:  # otherwise it is a dummy's
                push(self.partial_sums, 0, number, chunk, count, lambda left, right: left.add_(right))
        if strategy.is_last_round:
            ((_, _, total),) = self.partial_sums
            output_tensor.copy_(total)
            self.partial_sums = []
        else:  # partial sums must not keep all received chunks, nor lie where another exchange writes
            self.partial_sums = [
                (level, index, part.clone() if any(part is chunk for chunk in chunks) else part)
                for level, index, part in self.partial_sums
            ]

    def exchange(self, input_tensor: Tensor, group: dist.ProcessGroup) -> Sequence[Tensor]:
        """Return this rank's rows of each rank's gradients, in vectors the caller may change. Collective."""
        rank, workers = self.strategy.rank, self.strategy.world_size
        if self.strategy.areas is None:
            received = torch.empty_like(input_tensor)
            dist.all_to_all_single(received, input_tensor, group=group)
            return received.view(workers, -1).unbind()
        memory, size = self.strategy.areas.memory, len(input_tensor) // workers
        assert self.first_byte is not None, "FSDP2 asks for memory first"
        first_byte, self.first_byte = self.first_byte + rank * size * input_tensor.element_size(), None
        memory.barrier()
        return [memory.of(other, input_tensor.dtype, first_byte, size) for other in range(workers)]


def local(tensor: Any) -> Tensor:
    """Return the rows of a DTensor that this rank holds."""
    piece: Tensor = tensor.detach().to_local()
    return piece


def make_group(is_distributed: bool, timeout_s: float) -> dist.ProcessGroup:
    """Return a new process group of all ranks, or of this process alone without a launcher. Collective."""
    if not is_distributed and not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup)
    return group
