"""A step's gradient, summed in one fixed order whoever computes it: `trainer.reduction=exact`.

The gradients of a step's micro-batches are the leaves of the tree of tree.py. Inside a worker, partial sums
are kept like a binary counter, in place: as many additions as plain accumulation. Across workers,
bucket_reducer.py adds the workers' partial sums along the same tree, one bucket of parameters after the
other, as the backward pass fills them.

DistributedDataParallel would fill the buckets too, with a communication hook, but imports torch._dynamo for
it, which takes as long as torch itself at every start and restart.
"""

import contextlib
from collections.abc import Iterator
from concurrent.futures import Future

import torch
from torch import Tensor

from mingpt import events
from mingpt.distributed.shared_memory import connect
from mingpt.parallel.bucket_reducer import BucketReducer
from mingpt.parallel.shards import numel_by_rank, split_rows
from mingpt.parallel.strategy import Forward, StrategySetup
from mingpt.parallel.tree import PartialSums, cover, push
from mingpt.parallel.whole_weights import WholeWeights


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """left + right, in place of `right`."""
    torch._foreach_add_(right, left)
    return right


class ExactReduction(WholeWeights):
    """With several workers, the backward pass of a rank's last micro-batch sends each full bucket."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.partial_sums: PartialSums[list[Tensor]] = []
        covers = [cover(numbers, setup.micro_batches) for numbers in setup.micro_batches_by_rank]
        self.memory = connect(setup.context, setup.timeout_s)
        self.reducer = BucketReducer(covers, self.rank, setup.micro_batches, self.memory)
        self.grads_are_static = False
        self.is_last = False  # whether the micro-batch under way is this worker's last
        self.missing: list[set[int]] = []  # per bucket, the parameters whose gradient is still to come
        self.sent: list[Future[Tensor]] = []
        self.sums: dict[str, Tensor] = {}  # of the rows that this rank updates, if it updates not all
        if self.world_size > 1:
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.on_grad_ready(number)  # type: ignore[misc]
                )

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward, self.grads_are_static = forward, grads_are_static

    def start_step(self) -> None:
        self.partial_sums, self.sent = [], []
        self.missing = [set(bucket) for bucket in self.buckets]

    @contextlib.contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self.is_last = number == self.my_micro_batches[-1]
        yield
        if self.world_size == 1 and self.is_last:
            events.emit("reduction_start")
        if self.world_size == 1 or not self.is_last:
            gradients = [self.take_gradient(place) for place in range(len(self.parameters))]
            if self.grads_are_static:
                gradients = list(torch._foreach_mul(gradients, 1.0))  # copies, by a kernel or two
            push(self.partial_sums, 0, number, gradients, self.setup.micro_batches, add_lists)
            events.emit("partial_sums", micro_batch=number, sums=self.partial_sums)

    def take_gradient(self, number: int) -> Tensor:
        """A parameter's gradient, removed from it."""
        gradient = self.parameters[number].grad
        assert gradient is not None, "every parameter takes part in every micro-batch"
        self.parameters[number].grad = None
        return gradient

    def on_grad_ready(self, number: int) -> None:
        """A parameter's gradient is complete. Buckets are sent in the same order on all ranks."""
        if not self.is_last:
            return
        for missing in self.missing:
            missing.discard(number)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(self.buckets[len(self.sent)])

    def send(self, bucket: list[int]) -> None:
        """Add this bucket of the last micro-batch to the partial sums, then reduce those of all ranks."""
        pieces: list[list[Tensor]] = []
        if self.my_micro_batches:
            sums = [
                (level, index, [tensors[number] for number in bucket])
                for level, index, tensors in self.partial_sums
            ]
            gradients = [self.take_gradient(number) for number in bucket]
            push(sums, 0, self.my_micro_batches[-1], gradients, self.setup.micro_batches, add_lists)
            pieces = [self.pieces_by_rank(value) for _, _, value in sums]
            self.forget_partial_sums(bucket)
        empty = self.parameters[bucket[0]].new_empty(0)
        self.sent.append(
            self.reducer.reduce(pieces, self.chunk_sizes(bucket), empty, not self.updates_are_sharded)
        )

    def forget_partial_sums(self, bucket: list[int]) -> None:
        """Free what has been copied into a bucket."""
        for _, _, tensors in self.partial_sums:
            for number in bucket:
                tensors[number] = tensors[number].new_empty(0)

    def pieces_by_rank(self, gradients: list[Tensor]) -> list[Tensor]:
        """Vectors, in the order of the ranks that add them."""
        if not self.updates_are_sharded:
            return [gradient.flatten() for gradient in gradients]
        rows = [split_rows(len(gradient), self.world_size) for gradient in gradients]
        return [
            gradient[part[rank].start : part[rank].stop].flatten()
            for rank in range(self.world_size)
            for gradient, part in zip(gradients, rows, strict=True)
        ]

    def chunk_sizes(self, bucket: list[int]) -> list[int]:
        """Elements of a bucket that each rank adds: equal chunks, or the rows that it updates."""
        shapes = [self.parameters[number].shape for number in bucket]
        if self.updates_are_sharded:
            counts = [numel_by_rank(shape, self.world_size) for shape in shapes]
            return [sum(count[rank] for count in counts) for rank in range(self.world_size)]
        size = sum(shape.numel() for shape in shapes)
        chunk = -(-size // self.world_size)
        return [max(0, min(chunk, size - chunk * rank)) for rank in range(self.world_size)]

    def finish_step(self) -> None:
        if self.world_size == 1:
            ((_, _, root),) = self.partial_sums
            for parameter, gradient in zip(self.parameters, root, strict=True):
                parameter.grad = gradient
            self.partial_sums = []
            return
        if not self.my_micro_batches:
            for bucket in self.buckets:
                self.send(bucket)
        self.reducer.synchronize()
        for bucket, done in zip(self.buckets, self.sent, strict=True):
            self.take_sum(bucket, done.result())
        self.sent = []

    def take_sum(self, bucket: list[int], total: Tensor) -> None:
        """Hand out a bucket's sum: all of it, or this rank's rows."""
        for number in bucket:
            name, parameter = self.names[number], self.parameters[number]
            if self.updates_are_sharded:
                shape = parameter[self.my_rows(name)].shape
                self.sums[name], total = total[: shape.numel()].view(shape), total[shape.numel() :]
            else:
                parameter.grad, total = (
                    total[: parameter.numel()].view_as(parameter),
                    total[parameter.numel() :],
                )

    def gradients(self) -> dict[str, Tensor]:
        if self.updates_are_sharded:
            return {name: self.sums[name] for name in self.names}
        return super().gradients()

    def finish_update(self) -> None:
        self.sums = {}
        super().finish_update()
