"""Adds the ranks' partial sums of a bucket along the tree: all-to-all, local additions, all-gather.

These are the bytes of a ring all-reduce; ranks whose micro-batches are no whole subtree send a few more
partial sums. Buckets are exchanged one after the other, in a thread or on a stream of their own, beside the
backward pass. Issuing a bucket's all-gather when its all-to-all completes would deadlock, since ranks would
meet in different collectives.
"""

import queue
import threading
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt import events
from mingpt.parallel.tree import PartialSums, push

# all_gather_into_tensor is the name before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BucketReducer:
    """`covers` are the nodes of the tree whose sums each rank sends; the tree has `leaves` leaves."""

    def __init__(self, covers: list[list[tuple[int, int]]], rank: int, leaves: int) -> None:
        self.covers, self.rank, self.leaves = covers, rank, leaves
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream: torch.cuda.Stream | None = None
        self.thread: threading.Thread | None = None

    def reduce(self, buffer: Tensor, parts: list[Tensor]) -> Future[None]:
        """Begin to write the sum to `buffer`; `parts` are this rank's nodes, (buffer.numel(),) each."""
        future: Future[None] = Future()
        if buffer.is_cuda:
            self.reduce_on_stream(buffer, parts)
            future.set_result(None)
            return future
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
        self.jobs.put((buffer, parts, future))
        return future

    def reduce_on_stream(self, buffer: Tensor, parts: list[Tensor]) -> None:
        """On a stream of their own, NCCL's collectives run beside the backward pass."""
        self.stream = self.stream or torch.cuda.Stream(buffer.device)
        self.stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self.stream):
            for tensor in (buffer, *parts):
                tensor.record_stream(self.stream)
            self.sum_along_tree(buffer, parts)

    def synchronize(self) -> None:
        """Make the current stream wait for what was queued."""
        if self.stream:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)

    def serve(self) -> None:
        while True:
            buffer, parts, future = self.jobs.get()
            try:
                self.sum_along_tree(buffer, parts)
                future.set_result(None)
            except Exception as error:  # most often a lost peer: ExactReduction.finish_step raises it
                future.set_exception(error)

    def sum_along_tree(self, buffer: Tensor, parts: list[Tensor]) -> None:
        """Each rank adds one chunk of all parts along the tree; then all ranks gather all chunks."""
        events.emit("reduction_start")
        size, workers = buffer.numel(), len(self.covers)
        chunk = -(-size // workers)
        sizes = [max(0, min(chunk, size - chunk * rank)) for rank in range(workers)]
        my_size = sizes[self.rank]
        incoming = buffer.new_empty(sum(map(len, self.covers)) * my_size)
        received = [len(nodes) * my_size for nodes in self.covers]
        dist.all_to_all_single(
            incoming, by_rank(parts, sizes, buffer), received, [len(parts) * other for other in sizes]
        )
        stack: PartialSums[Tensor] = []
        nodes = [node for nodes in self.covers for node in nodes]
        for (level, index), part in zip(nodes, incoming.view(len(nodes), my_size), strict=True):
            push(stack, level, index, part, self.leaves, lambda left, right: left.add_(right))
        ((_, _, total),) = stack
        total = (
            total.contiguous() if my_size == chunk else torch.cat([total, total.new_zeros(chunk - my_size)])
        )
        gathered = buffer if chunk * workers == size else buffer.new_empty(chunk * workers)
        all_gather_single(gathered, total)
        if gathered is not buffer:
            buffer.copy_(gathered[:size])


def by_rank(parts: list[Tensor], sizes: list[int], like: Tensor) -> Tensor:
    """The parts, cut into chunks of these sizes, rank by rank, as all-to-all sends them."""
    if not parts:
        return like.new_empty(0)
    if len(parts) == 1:
        return parts[0]
    chunks = [part.split(sizes) for part in parts]
    return torch.cat([chunk[rank] for rank in range(len(sizes)) for chunk in chunks])
