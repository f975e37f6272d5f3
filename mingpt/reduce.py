"""A step's gradient, summed in one fixed order whoever computes it.

The gradients of a step's micro-batches are the leaves of a binary tree: node (level, index) is the sum of leaves
index * 2**level up to (index + 1) * 2**level, a left half plus a right half; where the right half would lie past the last leaf, a node
is its left half. Floating-point addition is not associative, so the tree, and nothing else, decides the bits of the sum.

Inside a worker, partial sums are kept like a binary counter, in place: as many additions as plain accumulation makes. Across
workers, each adds one chunk of every bucket of parameters along the tree (all-to-all) and shares the result (all-gather): the bytes of
a ring all-reduce. Workers whose micro-batches are no whole subtree send a few more partial sums. Buckets are exchanged one after the
other in a thread, or on a stream, of their own, as soon as the backward pass has filled them; were the second collective of one bucket
issued when its first is done, workers would meet in different collectives and wait for ever.

DistributedDataParallel would fill the buckets as well, through a communication hook, but imports torch._dynamo for it, which takes as
long as torch itself at every start and restart.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13

BUCKET_BYTES = 8 << 20  # large enough for the collectives to be worth it, small enough for the first to start early

V = TypeVar("V")
Stack = list[tuple[int, int, V]]  # (level, index, sum), from left to right


def push(stack: Stack[V], level: int, index: int, value: V, leaves: int, add: Callable[[V, V], V]) -> None:
    """Put a node to the right of those on the stack and merge as far as the tree of so many leaves allows."""
    while 1 << level < leaves:
        if index % 2:
            if not stack or stack[-1][:2] != (level, index - 1):
                break
            value = add(stack.pop()[2], value)
        elif (index + 1) << level < leaves:
            break  # a right half is still to come
        level, index = level + 1, index // 2
    stack.append((level, index, value))


def cover(leaves: range, total: int) -> list[tuple[int, int]]:
    """The fewest nodes that hold just these neighbouring leaves, from left to right."""
    stack: Stack[None] = []
    for leaf in leaves:
        push(stack, 0, leaf, None, total, lambda *_: None)
    return [(level, index) for level, index, _ in stack]


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """left + right, in place of `right`."""
    torch._foreach_add_(right, left)
    return right


class GradientTree:
    """The exact sum of a step's gradients for one worker, which computes the leaves `shares[rank]` of `leaves`.

    A step is `begin`, then for each leaf `before`, its backward pass and `after`, then `finish`, which leaves the sum in every `grad`. A
    worker without leaves calls `begin` and `finish` alone. With several workers the backward pass of the last leaf sends every bucket
    on its way as soon as its gradients are there. `borrowed` gradients lie where the next backward pass writes its own.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shares: list[range], rank: int, borrowed: bool = False) -> None:
        self.parameters = list(parameters)
        self.borrowed = borrowed
        self.leaves, self.mine, self.workers = max(share.stop for share in shares), shares[rank], len(shares)
        self.stack: Stack[list[Tensor]] = []
        self.exchange = Exchanger([cover(share, self.leaves) for share in shares], rank, self.leaves)
        self.buckets = in_buckets(self.parameters)
        self.sharing = False
        self.missing: list[set[int]] = []  # per bucket, the parameters whose gradient is still to come
        self.sent: list[tuple[Tensor, Future[None]]] = []
        if self.workers > 1:
            for number, weight in enumerate(self.parameters):
                weight.register_post_accumulate_grad_hook(lambda _, number=number: self.arrived(number))  # type: ignore[misc]

    def begin(self) -> None:
        self.stack, self.sent, self.missing = [], [], [set(bucket) for bucket in self.buckets]

    def before(self, leaf: int) -> None:
        self.sharing = self.workers > 1 and leaf == self.mine[-1]

    def after(self, leaf: int) -> None:
        """Move every parameter's gradient into the tree as this leaf."""
        if not self.sharing:
            gradients = [self.gradient(number) for number in range(len(self.parameters))]
            if self.borrowed:
                gradients = list(torch._foreach_mul(gradients, 1.0))  # copies, made by a kernel or two
            push(self.stack, 0, leaf, gradients, self.leaves, add_lists)

    def gradient(self, number: int) -> Tensor:
        """A parameter's gradient, taken from it."""
        gradient = self.parameters[number].grad
        assert gradient is not None, "every parameter takes part in every micro-batch"
        self.parameters[number].grad = None
        return gradient

    def arrived(self, number: int) -> None:
        """The last leaf's gradient of a parameter is there. Buckets leave in one order on all workers."""
        if not self.sharing:
            return
        for missing in self.missing:
            missing.discard(number)
        while len(self.sent) < len(self.buckets) and not self.missing[len(self.sent)]:
            self.send(self.buckets[len(self.sent)])

    def send(self, bucket: list[int]) -> None:
        """This bucket of the last leaf joins the partial sums, then all workers' sums join."""
        parts: list[Tensor] = []
        if self.mine:
            stack = [(level, index, [sums[number] for number in bucket]) for level, index, sums in self.stack]
            push(stack, 0, self.mine[-1], [self.gradient(number) for number in bucket], self.leaves, add_lists)
            parts = [torch.cat([sums.flatten() for sums in value]) for _, _, value in stack]
        first = self.parameters[bucket[0]]
        size = sum(self.parameters[number].numel() for number in bucket)
        total = parts[-1] if parts else torch.empty(size, dtype=first.dtype, device=first.device)
        self.sent.append((total, self.exchange(total, parts)))

    def finish(self) -> None:
        """Wait for all sums. Raises what kept the workers from exchanging them, most often a peer that is gone."""
        if self.workers == 1:
            ((_, _, root),) = self.stack
            for weight, gradient in zip(self.parameters, root, strict=True):
                weight.grad = gradient
            return
        if not self.mine:
            for bucket in self.buckets:
                self.send(bucket)
        self.exchange.catch_up()
        for bucket, (total, done) in zip(self.buckets, self.sent, strict=True):
            done.result()
            weights = [self.parameters[number] for number in bucket]
            for weight, gradient in zip(weights, total.split([weight.numel() for weight in weights]), strict=True):
                weight.grad = gradient.view_as(weight)


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[list[int]]:
    """Numbers of parameters, in the order in which a backward pass is likely to reach them, in runs of about BUCKET_BYTES."""
    buckets: list[list[int]] = [[]]
    held = 0
    for number in reversed(range(len(parameters))):
        if held and held + parameters[number].nbytes > BUCKET_BYTES:
            buckets.append([])
            held = 0
        buckets[-1].append(number)
        held += parameters[number].nbytes
    return buckets


class Exchanger:
    """Adds the workers' parts of a bucket along the tree, one bucket after the other, beside the backward pass."""

    def __init__(self, covers: list[list[tuple[int, int]]], rank: int, leaves: int) -> None:
        self.covers, self.rank, self.leaves = covers, rank, leaves
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream: torch.cuda.Stream | None = None
        self.thread: threading.Thread | None = None

    def __call__(self, buffer: Tensor, parts: list[Tensor]) -> Future[None]:
        """Done when the sum stands in `buffer`; `parts` are this worker's nodes, (buffer.numel(),) each, and may be the buffer itself."""
        future: Future[None] = Future()
        if buffer.is_cuda:
            self.on_stream(buffer, parts)
            future.set_result(None)
            return future
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
        self.jobs.put((buffer, parts, future))
        return future

    def on_stream(self, buffer: Tensor, parts: list[Tensor]) -> None:
        """NCCL's collectives are queued, not waited for: a stream of their own keeps them beside the backward pass."""
        self.stream = self.stream or torch.cuda.Stream(buffer.device)
        self.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self.stream):
            for tensor in (buffer, *parts):
                tensor.record_stream(self.stream)
            self.sum_up(buffer, parts)

    def catch_up(self) -> None:
        """What is computed from here on waits for what was queued."""
        if self.stream:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def serve(self) -> None:
        while True:
            buffer, parts, future = self.jobs.get()
            try:
                self.sum_up(buffer, parts)
                future.set_result(None)
            except Exception as error:  # most often a peer is gone: GradientTree.finish raises it
                future.set_exception(error)

    def sum_up(self, buffer: Tensor, parts: list[Tensor]) -> None:
        """Every worker adds one chunk of all parts along the tree; all get all chunks."""
        size, workers = buffer.numel(), len(self.covers)
        chunk = -(-size // workers)
        sizes = [max(0, min(chunk, size - chunk * rank)) for rank in range(workers)]
        mine = sizes[self.rank]
        pieces = [part.split(sizes) for part in parts]
        outgoing = (
            parts[0] if len(parts) == 1 else torch.cat([piece[rank] for rank in range(workers) for piece in pieces]) if parts else buffer.new_empty(0)
        )
        incoming = buffer.new_empty(sum(map(len, self.covers)) * mine)
        dist.all_to_all_single(incoming, outgoing, [len(nodes) * mine for nodes in self.covers], [len(parts) * other for other in sizes])
        stack: Stack[Tensor] = []
        nodes = [node for nodes in self.covers for node in nodes]
        for (level, index), part in zip(nodes, incoming.view(len(nodes), mine), strict=True):
            push(stack, level, index, part, self.leaves, lambda left, right: left.add_(right))
        ((_, _, total),) = stack
        whole = buffer if chunk * workers == size else buffer.new_empty(chunk * workers)
        all_gather_single(whole, total.contiguous() if mine == chunk else torch.cat([total, total.new_zeros(chunk - mine)]))
        if whole is not buffer:
            buffer.copy_(whole[:size])
