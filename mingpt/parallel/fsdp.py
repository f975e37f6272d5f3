"""FSDP2, `trainer.parallel=fsdp`: each rank holds its rows of every weight, gradient and optimizer state.

A unit is a block, or all weights outside of blocks; a model that fits one bucket of ddp.py is a single unit.
For each unit, tensors are sent in two phases:

1. All-gather, before the unit's forward pass: each rank sends its rows of the weights to all ranks. With
   `trainer.fsdp_reshard`, the weights of a unit that is a block are freed after its forward pass, and
   gathered again for its backward pass. Other weights are kept until the unit's backward pass has ended.
2. Reduce-scatter, after the unit's backward pass: each rank receives its rows of the gradients, reduced over
   all ranks.

So all ranks must make each forward and backward pass together. A step has turns: in a turn each rank computes
one micro-batch. A rank without a micro-batch in the last turn computes a dummy one, which is not counted.

With `trainer.reduction=exact`, the second phase is no reduce-scatter: each rank receives its rows of all
ranks' gradients, and adds these rows along the tree of tree.py, as ExactReduction does.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.base import events
from mingpt.base.errors import UserError
from mingpt.parallel.ddp import fits_one_bucket, gradient_of
from mingpt.parallel.strategy import Forward, Strategy, StrategySetup, allocate, digest
from mingpt.parallel.tree import PartialSums, add_lists, push


class FSDPReduction(Strategy):
    """FSDP2 with the backend's reduce-scatter, `trainer.reduction=fast`.

    Constructing it is collective. FSDP2's collectives use their own process group, because the heartbeats of
    `Group.on_all` may use the default group at the same time. The constructor raises UserError for a weight
    without dimensions, or if all weights are frozen.
    """

    takes_turns = weights_are_sharded = updates_are_sharded = True

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        for name, shape in self.shapes.items():
            if not shape:
                raise UserError(
                    f"{name} has no dimensions, and trainer.parallel=fsdp splits weights along their first: "
                    "give it the shape (1,), or set trainer.parallel=ddp"
                )
        self.transport = self.context.transport.with_own_group(setup.timeout_s)
        self.units: list[Any] = [setup.model]  # the model itself holds the weights outside of blocks
        if not fits_one_bucket(sum(weight.nbytes for weight in setup.model.parameters())):
            self.units = [*setup.blocks, setup.model]
        self.shard()
        allocate(setup.model, self.context.device)
        for unit in self.units:  # afterwards the unit's parameters stay the same objects
            unit.unshard()
            unit.reshard()
        self.all_weights = dict(setup.model.named_parameters())
        self.weights = {name: self.all_weights[name] for name in self.trained}
        self.turns = max(map(len, setup.micro_batches_by_rank))
        self.found: dict[str, Tensor] | None = None  # digests of gradients that are not counted
        for number, unit in enumerate(self.units):
            if self.transport.fsdp_all_gather:
                unit.set_custom_all_gather(self.transport.fsdp_all_gather)
            unit.set_custom_reduce_scatter(ReduceScatter(self, number))
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # from torch 2.13 on
                unit.set_reduce_scatter_unused_params(True)

    def shard(self) -> None:
        # These imports take 0.6 s, which only runs with fsdp should pay.
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        assert self.transport.group is not None
        mesh = DeviceMesh.from_group(self.transport.group, self.context.device.type)
        policy = MixedPrecisionPolicy()
        if self.setup.param_dtype:
            policy = MixedPrecisionPolicy(param_dtype=self.setup.param_dtype, reduce_dtype=torch.float32)
        for unit in self.units:
            is_root = unit is self.setup.model
            fully_shard(
                unit, mesh=mesh, reshard_after_forward=self.setup.reshard and not is_root, mp_policy=policy
            )

    def prepare(self, forward: Forward) -> None:
        self.forward = forward
        self.loss_weight *= self.world_size  # FSDP2 takes the mean over the ranks

    def pieces(self) -> dict[str, Tensor]:
        return {name: local(weight) for name, weight in self.weights.items()}

    def held_weights(self) -> dict[str, Tensor]:
        return {name: local(weight) for name, weight in self.all_weights.items()}

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        if number // self.world_size == self.turns - 1:
            events.emit("reduction_start")
        yield

    def finish_step(self) -> None:
        if len(self.my_micro_batches) < self.turns:
            self.dummy_backward()

    def any(self, flag: bool) -> bool:
        if self.world_size == 1:
            return flag
        count = self.transport.all_reduce_async(torch.tensor([float(flag)], device=self.context.device))
        return bool(count().item())

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
        """Inside the context `unreduced`, record the digest of this rank's `gradients` of `units[number]`.

        Outside of the context, do nothing.
        """
        if self.found is not None:
            is_model = self.units[number] is self.setup.model  # or only its weights outside of blocks
            self.found["the model" if is_model else f"block {number}"] = digest(gradients)

    def reduce_scatter(self, number: int, gradients: Tensor, rows: Tensor, op: Any) -> None:
        """Reduce the gradients of `units[number]` over all ranks with the ReduceOp `op`. Collective.

        This rank's rows of the result are written to `rows`.
        """
        self.transport.reduce_scatter(rows, gradients, op)

    def gradients(self) -> dict[str, Tensor]:
        return {name: local(gradient_of(weight)) for name, weight in self.weights.items()}

    def finish_update(self) -> None:
        for weight in self.weights.values():
            weight.grad = None


class ExactFSDPReduction(FSDPReduction):
    """FSDP2 with gradients summed along the binary tree of tree.py, `trainer.reduction=exact`.

    FSDP2 itself adds no gradients: `grad` gets the finished sum after the last micro-batches of a step.
    """

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.first = 0  # the number of rank 0's micro-batch in the turn under way
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor

    def prepare(self, forward: Forward) -> None:
        self.forward = forward

    def start_step(self, loss_scale: float = 1.0) -> None:
        super().start_step(loss_scale)
        self.unit_sums: list[PartialSums[Tensor]] = [[] for _ in self.units]
        self.partial_sums: PartialSums[list[Tensor]] = []  # of all units, if there is a single rank

    @property
    def is_last_turn(self) -> bool:
        return self.first + self.world_size >= self.setup.micro_batches

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self.begin_turn(number // self.world_size)
        yield
        if self.world_size == 1:  # then FSDP2 exchanges nothing
            gradients = list(self.gradients().values())
            push(self.partial_sums, 0, number, gradients, self.setup.micro_batches, add_lists)
            if self.is_last_turn:
                events.emit("reduction_start")
                ((_, _, total),) = self.partial_sums
                for gradient, piece in zip(gradients, total, strict=True):
                    if gradient is not piece:
                        gradient.copy_(piece)

    def begin_turn(self, number: int) -> None:
        self.first = number * self.world_size
        self.finish_update()  # frees FSDP2's outputs of the previous turn

    def finish_step(self) -> None:
        if len(self.my_micro_batches) < self.turns:
            self.begin_turn(self.turns - 1)
            self.dummy_backward()

    def reduce_scatter(self, number: int, gradients: Tensor, rows: Tensor, op: Any) -> None:
        """Exchange the gradients of `units[number]`; add this rank's rows to the partial sums. Collective.

        For the last micro-batches of a step, also write the sum for this rank's rows to `rows`. Inside the
        context `unreduced`, add nothing and write zeros. `op` is ignored.
        """
        is_counted = self.found is None
        if is_counted and self.is_last_turn:
            events.emit("reduction_start")
        with self.transport.scattered(gradients) as chunks:
            if is_counted:
                self.add(self.unit_sums[number], chunks, rows)
            else:
                rows.zero_()

    def add(self, partial_sums: PartialSums[Tensor], chunks: Sequence[Tensor], rows: Tensor) -> None:
        """Add each rank's gradients of this rank's rows, `chunks`, to `partial_sums`, in place.

        A rank's chunk is left out if the rank had no micro-batch left. After the last micro-batches of a
        step, the sum over all micro-batches is written to `rows`, and `partial_sums` becomes empty.
        """
        count = self.setup.micro_batches
        for number, chunk in enumerate(chunks, self.first):
            if number < count:  # otherwise it is a dummy's
                push(partial_sums, 0, number, chunk, count, Tensor.add_)
        if self.is_last_turn:
            ((_, _, total),) = partial_sums
            rows.copy_(total)
            partial_sums.clear()
        # `push` adds in place, so a partial sum may be in the memory of a received chunk. The next turn would
        # overwrite that chunk, and the memory of all chunks would be kept.
        partial_sums[:] = [
            (level, index, part.clone() if any(part is chunk for chunk in chunks) else part)
            for level, index, part in partial_sums
        ]


class ReduceScatter:
    """The reduce-scatter that FSDP2 calls after the backward pass of `strategy.units[number]`.

    Before each call FSDP2 calls `allocate` twice: for the unit's whole gradients, then for this rank's rows.
    """

    def __init__(self, strategy: FSDPReduction, number: int) -> None:
        self.strategy, self.number = strategy, number
        self.allocators: Iterator[Callable[..., Tensor]] = itertools.cycle(
            [strategy.transport.empty_scattered, torch.empty]
        )

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return next(self.allocators)(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        self.strategy.note_digest(self.number, input_tensor)
        self.strategy.reduce_scatter(self.number, input_tensor, output_tensor, op)


def local(tensor: Any) -> Tensor:
    """Return the rows of a DTensor that this rank holds, as a plain tensor."""
    piece: Tensor = tensor.detach().to_local()
    return piece
