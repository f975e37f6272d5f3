"""A step's gradient, summed in one fixed order on any number of workers: `trainer.reduction=exact`.

The gradients of a step's micro-batches are the leaves of the tree of tree.py. A worker adds two halves of a
node in place as soon as it has both: as many additions as plain accumulation. Across workers,
`BucketReducer` adds the workers' partial sums along the same tree, one bucket of parameters after the other,
as the backward pass fills them: all-to-all, local additions, all-gather. The bytes are as many as in a ring
all-reduce; ranks whose micro-batches are no whole subtree send a few more partial sums. If all ranks share
memory, each rank reads the partial sums in the others' segments, and nothing is sent.

Buckets are exchanged one after the other, in a thread or on a stream of their own, beside the backward pass.
If each bucket's all-gather were issued when its all-to-all completes, ranks could issue collectives in
different orders, and deadlock.

DistributedDataParallel with a communication hook would fill the buckets, too, but imports torch._dynamo for
the hook. That takes as long as importing torch, at every start and restart.
"""

import contextlib
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.base import events
from mingpt.distributed.shared_memory import SharedMemory
from mingpt.parallel.ddp import WholeWeights
from mingpt.parallel.strategy import Forward, StrategySetup
from mingpt.parallel.tree import PartialSums, cover, push

# all_gather_into_tensor is the name before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BucketReducer:
    """Adds the workers' partial sums, bucket by bucket, along the tree, which has `leaves` leaves.

    `covers[rank]` has the nodes whose sums that rank sends. `memory` is shared by all ranks; None if none is.
    """

    def __init__(
        self, covers: list[list[tuple[int, int]]], rank: int, leaves: int, memory: SharedMemory | None = None
    ) -> None:
        self.covers, self.rank, self.leaves, self.memory = covers, rank, leaves, memory
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream: torch.cuda.Stream | None = None
        self.thread: threading.Thread | None = None

    def reduce(
        self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Future[Tensor]:
        """Begin to add up a bucket. The future gets the sum if `gathers`, else this rank's chunk of the sum.

        Collective. `pieces` has, for each of this rank's nodes, vectors that together are the bucket, with
        sum(sizes) elements; `sizes[rank]` is the size of a rank's chunk. A rank may have no nodes, so the
        empty tensor `like` gives dtype and device. Do not change the pieces before the future is done. On a
        GPU, call `synchronize` before using the sum. On a CPU, the future raises the error of a lost peer.
        """
        future: Future[Tensor] = Future()
        if self.memory is None:
            pieces = [[torch.cat(of_node)] for of_node in pieces]
        if like.is_cuda:
            future.set_result(self.reduce_on_stream(pieces, sizes, like, gathers))
            return future
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
        self.jobs.put((pieces, sizes, like, gathers, future))
        return future

    def reduce_on_stream(
        self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Tensor:
        """Return the sum for `reduce`, added on a separate stream: NCCL runs beside the backward pass."""
        self.stream = self.stream or torch.cuda.Stream(like.device)
        current = torch.cuda.current_stream(like.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for (part,) in pieces:
                part.record_stream(self.stream)
            total = self.sum_along_tree(pieces, sizes, like, gathers)
        total.record_stream(current)
        return total

    def synchronize(self) -> None:
        """Make the current CUDA stream wait for the additions that `reduce` has queued."""
        if self.stream:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def serve(self) -> None:
        while True:
            *job, future = self.jobs.get()
            try:
                future.set_result(self.sum_along_tree(*job))
            except Exception as error:  # most often a lost peer: ExactReduction.finish_step raises it
                future.set_exception(error)
            del job

    def sum_along_tree(
        self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Tensor:
        """Return the whole sum if `gathers`, else this rank's chunk; arguments as in `reduce`. Collective."""
        events.emit("reduction_start")
        if self.memory is not None:
            return self.sum_in_memory(self.memory, pieces, sizes, like, gathers)
        parts = [part for (part,) in pieces]
        my_size = sizes[self.rank]
        incoming = like.new_empty(sum(map(len, self.covers)) * my_size)
        received = [len(nodes) * my_size for nodes in self.covers]
        dist.all_to_all_single(
            incoming, by_rank(parts, sizes, like), received, [len(parts) * other for other in sizes]
        )
        count = sum(map(len, self.covers))
        total = self.add(list(incoming.view(count, my_size)))
        if not gathers:
            return total if count == 1 else total.clone()  # a view would keep the memory of all parts
        size, chunk = sum(sizes), max(sizes)
        padded = (
            total.contiguous() if my_size == chunk else torch.cat([total, total.new_zeros(chunk - my_size)])
        )
        gathered = like.new_empty(chunk * len(sizes))
        all_gather_single(gathered, padded)
        return gathered[:size]

    def add(self, parts: list[Tensor]) -> Tensor:
        """Return the tree's sum of parts, one per node, in the first's memory; others may be overwritten."""
        stack: PartialSums[Tensor] = []
        nodes = [node for nodes in self.covers for node in nodes]
        for (level, index), part in zip(nodes, parts, strict=True):
            push(stack, level, index, part, self.leaves, lambda left, right: left.add_(right))
        ((_, _, total),) = stack
        return total

    def sum_in_memory(
        self, memory: SharedMemory, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Tensor:
        """Do `sum_along_tree` in shared memory: each rank adds up its chunk of the parts in all segments."""
        size, counts = sum(sizes), [len(nodes) for nodes in self.covers]
        memory.begin(max(counts) * size * like.element_size())
        for place, of_node in enumerate(pieces):
            torch.cat(of_node, out=memory.of(self.rank, like.dtype, place * size * like.element_size(), size))
        memory.barrier()
        parts = [
            memory.of(rank, like.dtype, place * size * like.element_size(), size)
            for rank, count in enumerate(counts)
            for place in range(count)
        ]
        if gathers and len(parts) == 2:  # fewer bytes to read than if ranks shared the work, and one barrier
            total = parts[0] + parts[1]
            memory.end()
            return total
        first = sum(sizes[: self.rank])
        total = self.add([part[first : first + sizes[self.rank]] for part in parts])
        if gathers:
            memory.barrier()
            total = parts[0]
        total = total.clone()
        memory.end()
        return total


def by_rank(parts: list[Tensor], sizes: list[int], like: Tensor) -> Tensor:
    """Cut each part into a chunk per rank, of `sizes`; return all chunks in one vector, by rank, then part.

    `like` gives the dtype and device of the empty vector if there are no parts.
    """
    if not parts:
        return like.new_empty(0)
    if len(parts) == 1:
        return parts[0]
    chunks = [part.split(sizes) for part in parts]
    return torch.cat([chunk[rank] for rank in range(len(sizes)) for chunk in chunks])


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Add each tensor of `left` to its counterpart in `right`, in place; return `right`."""
    torch._foreach_add_(right, left)
    return right


class ExactReduction(WholeWeights):
    """Sums gradients along the tree. With several workers, the last backward pass sends each full bucket."""

    def __init__(self, setup: StrategySetup) -> None:
        super().__init__(setup)
        self.partial_sums: PartialSums[list[Tensor]] = []
        covers = [cover(numbers, setup.micro_batches) for numbers in setup.micro_batches_by_rank]
        self.memory = setup.context.connect_memory(setup.timeout_s)
        self.reducer = BucketReducer(covers, self.rank, setup.micro_batches, self.memory)
        self.grads_are_static = False
        self.is_last = False  # whether the micro-batch under way is this worker's last
        self.missing: list[set[int]] = []  # per bucket, the parameters whose gradient is still to come
        self.sent: list[Future[Tensor]] = []
        self.sums: dict[str, Tensor] = {}  # of the rows that this rank updates, if updates are sharded
        if self.world_size > 1:
            for number, parameter in enumerate(self.parameters):
                parameter.register_post_accumulate_grad_hook(
                    lambda _, number=number: self.on_grad_ready(number)  # type: ignore[misc]
                )

    def prepare(self, forward: Forward, grads_are_static: bool = False) -> None:
        self.forward, self.grads_are_static = forward, grads_are_static

    def start_step(self, loss_scale: float = 1.0) -> None:
        super().start_step(loss_scale)
        self.partial_sums, self.sent, self.is_last = [], [], False
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
            events.emit("partial_sums")

    def take_gradient(self, number: int) -> Tensor:
        """Return the gradient of parameter `number`, and remove it from the parameter."""
        gradient = self.parameters[number].grad
        assert gradient is not None, "every parameter takes part in every micro-batch"
        self.parameters[number].grad = None
        return gradient

    def on_grad_ready(self, number: int) -> None:
        """In the last micro-batch, note a gradient, and send full buckets, in the same order on all ranks."""
        if not self.is_last:
            return
        for missing in self.missing:
            missing.discard(number)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(self.buckets[len(self.sent)])

    def send(self, bucket: list[int]) -> None:
        """Add a bucket of the last micro-batch to the partial sums, and begin its reduction. Collective."""
        pieces: list[list[Tensor]] = []
        if self.my_micro_batches:
            sums = [
                (level, index, [tensors[number] for number in bucket])
                for level, index, tensors in self.partial_sums
            ]
            gradients = [self.take_gradient(number) for number in bucket]
            push(sums, 0, self.my_micro_batches[-1], gradients, self.setup.micro_batches, add_lists)
            pieces = [self.pieces_by_rank(bucket, value) for _, _, value in sums]
            self.forget_partial_sums(bucket)
        empty = self.parameters[bucket[0]].new_empty(0)
        self.sent.append(
            self.reducer.reduce(pieces, self.chunk_sizes(bucket), empty, not self.updates_are_sharded)
        )

    def forget_partial_sums(self, bucket: list[int]) -> None:
        """Drop a bucket's partial sums, so that their memory is freed once the reduction has copied them."""
        for _, _, tensors in self.partial_sums:
            for number in bucket:
                tensors[number] = tensors[number].new_empty(0)

    def pieces_by_rank(self, bucket: list[int], gradients: list[Tensor]) -> list[Tensor]:
        """Return a bucket's gradients as vectors; if updates are sharded, each rank's rows, by rank."""
        if not self.updates_are_sharded:
            return [gradient.flatten() for gradient in gradients]
        named = [(self.names[number], gradient) for number, gradient in zip(bucket, gradients, strict=True)]
        return [
            gradient[self.rows.of(name, rank).start : self.rows.of(name, rank).stop].flatten()
            for rank in range(self.world_size)
            for name, gradient in named
        ]

    def chunk_sizes(self, bucket: list[int]) -> list[int]:
        """Return the sizes of the ranks' chunks of a bucket: about equal, or, if sharded, their rows."""
        shapes = [self.parameters[number].shape for number in bucket]
        if self.updates_are_sharded:
            counts = [self.rows.numel(self.names[number]) for number in bucket]
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
        """Store a bucket's sum in the parameters' `grad`; if sharded, store this rank's rows in `sums`."""
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
