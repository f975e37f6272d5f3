"""A step's gradient, summed in one fixed order whoever computes it.

The gradients of a step's micro-batches are the leaves of a binary tree: node (level, index) is the sum of leaves
index * 2**level up to (index + 1) * 2**level, a left half plus a right half; where the right half would lie past the last leaf, a node
is its left half. Floating-point addition is not associative, so the tree, and nothing else, decides the bits of the sum.

Inside a worker, partial sums are kept like a binary counter, in place: as many additions as plain accumulation makes. Across
workers, a DDP communication hook lets each worker add one chunk of every bucket along the tree (all-to-all) and share the result
(all-gather): the bytes of a ring all-reduce. Workers whose micro-batches are no whole subtree send a few more partial sums. Buckets are
exchanged one after the other in a thread, or on a stream, of their own, so that they overlap with the backward pass; were the second
collective of one bucket issued when its first is done, workers would meet in different collectives and wait for ever.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13

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
    """left + right, in place of `right`: for the last leaf that is DDP's own bucket. Addition commutes to the bit."""
    torch._foreach_add_(right, left)
    return right


class GradientTree:
    """The exact sum of a step's gradients for one worker, which computes the leaves `shares[rank]` of `leaves`.

    A step is `begin`, then `take` after the backward pass of each leaf. Without DDP, `finish` leaves the sum in every `grad`.
    With DDP, the backward pass of the last leaf is not taken: `hook` folds it in, bucket by bucket. A worker without leaves
    lets DDP see some backward pass all the same, and contributes nothing.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], shares: list[range], rank: int) -> None:
        self.parameters = list(parameters)
        self.place = {id(weight): number for number, weight in enumerate(self.parameters)}
        self.leaves, self.mine, self.rank = max(share.stop for share in shares), shares[rank], rank
        self.covers = [cover(share, self.leaves) for share in shares]
        self.stack: Stack[list[Tensor]] = []
        self.exchange = Exchanger(self.covers, rank, self.leaves)

    def begin(self) -> None:
        self.stack = []

    def take(self, leaf: int) -> None:
        """Move every parameter's gradient into the tree as this leaf."""
        gradients = []
        for weight in self.parameters:
            assert weight.grad is not None, "every parameter takes part in every micro-batch"
            gradients.append(weight.grad)
            weight.grad = None
        push(self.stack, 0, leaf, gradients, self.leaves, add_lists)

    def finish(self) -> None:
        """Where there is one worker: the root becomes the gradient."""
        ((_, _, total),) = self.stack
        for weight, gradient in zip(self.parameters, total, strict=True):
            weight.grad = gradient

    def hook(self, _: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's communication hook: this bucket of the last leaf joins the partial sums, then all workers' sums join."""
        parts: list[Tensor] = []
        if self.mine:
            numbers = [self.place[id(weight)] for weight in bucket.parameters()]
            stack = [(level, index, [sums[number] for number in numbers]) for level, index, sums in self.stack]
            push(stack, 0, self.mine[-1], bucket.gradients(), self.leaves, add_lists)
            parts = [torch.cat([sums.flatten() for sums in value]) for _, _, value in stack[:-1]] + [bucket.buffer()]
        return self.exchange(bucket.buffer(), parts)


class Exchanger:
    """Adds the workers' parts of a bucket along the tree, one bucket after the other, beside the backward pass."""

    def __init__(self, covers: list[list[tuple[int, int]]], rank: int, leaves: int) -> None:
        self.covers, self.rank, self.leaves = covers, rank, leaves
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream: torch.cuda.Stream | None = None
        self.thread: threading.Thread | None = None

    def __call__(self, buffer: Tensor, parts: list[Tensor]) -> torch.futures.Future[Tensor]:
        """A future of `buffer`, in which the sum then stands. `parts` are this worker's nodes, (buffer.numel(),) each."""
        if buffer.is_cuda:
            return self.on_stream(buffer, parts)
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        if len(self.covers) == 1:
            future.set_result(buffer)
            return future
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
        self.jobs.put((buffer, parts, future))
        return future

    def on_stream(self, buffer: Tensor, parts: list[Tensor]) -> torch.futures.Future[Tensor]:
        """NCCL's collectives are queued, not waited for: a stream of their own keeps them beside the backward pass."""
        self.stream = self.stream or torch.cuda.Stream(buffer.device)
        self.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device])
        with torch.cuda.stream(self.stream):
            for tensor in (buffer, *parts):
                tensor.record_stream(self.stream)
            if len(self.covers) > 1:
                self.sum_up(buffer, parts)
            future.set_result(buffer)
        return future

    def serve(self) -> None:
        while True:
            buffer, parts, future = self.jobs.get()
            try:
                self.sum_up(buffer, parts)
                future.set_result(buffer)
            except Exception as error:  # most often a peer is gone: the words reach the backward pass, where DDP waits for the future
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
