"""A step's gradient, summed in one fixed order whoever computes it: `trainer.reduction=exact`.

The gradients of a step's micro-batches are the leaves of the tree of tree.py. Inside a worker, partial sums
are kept like a binary counter, in place: as many additions as plain accumulation. Across workers,
bucket_reducer.py adds the workers' partial sums along the same tree, one bucket of parameters after the
other, as the backward pass fills them.

DistributedDataParallel would fill the buckets too, with a communication hook, but imports torch._dynamo for
it, which takes as long as torch itself at every start and restart.
"""

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from mingpt import events
from mingpt.parallel.bucket_reducer import BucketReducer
from mingpt.parallel.strategy import Strategy, StrategySetup
from mingpt.parallel.tree import PartialSums, cover, push

# Large enough for a collective to be efficient, small enough for the first to start early.
BUCKET_BYTES = 8 << 20


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """left + right, in place of `right`."""
    torch._foreach_add_(right, left)
    return right


class ExactReduction(Strategy):
    """With several workers, the backward pass of a rank's last micro-batch sends each full bucket."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.parameters = list(setup.parameters)
        self.world_size = setup.context.world_size
        self.partial_sums: PartialSums[list[Tensor]] = []
        covers = [cover(numbers, setup.micro_batches) for numbers in setup.micro_batches_by_rank]
        self.reducer = BucketReducer(covers, setup.context.rank, setup.micro_batches)
        self.buckets = make_buckets(self.parameters)
        self.is_last = False  # whether the micro-batch under way is this worker's last
        self.missing: list[set[int]] = []  # per bucket, the parameters whose gradient is still to come
        self.sent: list[tuple[Tensor, Future[None]]] = []
        if self.world_size > 1:
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.on_grad_ready(number)  # type: ignore[misc]
                )

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
            if self.setup.grads_are_static:
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
        parts: list[Tensor] = []
        if self.my_micro_batches:
            sums = [
                (level, index, [tensors[number] for number in bucket])
                for level, index, tensors in self.partial_sums
            ]
            gradients = [self.take_gradient(number) for number in bucket]
            push(sums, 0, self.my_micro_batches[-1], gradients, self.setup.micro_batches, add_lists)
            parts = [torch.cat([tensor.flatten() for tensor in value]) for _, _, value in sums]
        first = self.parameters[bucket[0]]
        size = sum(self.parameters[number].numel() for number in bucket)
        total = parts[-1] if parts else torch.empty(size, dtype=first.dtype, device=first.device)
        done = self.reducer.reduce(total, parts)
        self.sent.append((total, done))

    def finish_step(self) -> None:
        if self.world_size == 1:
            ((_, _, root),) = self.partial_sums
            for parameter, gradient in zip(self.parameters, root, strict=True):
                parameter.grad = gradient
            return
        if not self.my_micro_batches:
            for bucket in self.buckets:
                self.send(bucket)
        self.reducer.synchronize()
        for bucket, (total, done) in zip(self.buckets, self.sent, strict=True):
            done.result()
            parameters = [self.parameters[number] for number in bucket]
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, gradient in zip(parameters, total.split(sizes), strict=True):
                parameter.grad = gradient.view_as(parameter)


def make_buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Numbers of parameters in the likely order of a backward pass, in runs of about BUCKET_BYTES."""
    buckets: list[list[int]] = [[]]
    size = 0
    for number in reversed(range(len(parameters))):
        if size and size + parameters[number].nbytes > BUCKET_BYTES:
            buckets.append([])
            size = 0
        buckets[-1].append(number)
        size += parameters[number].nbytes
    return buckets
