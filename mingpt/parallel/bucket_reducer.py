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

    def reduce(self, parts: list[Tensor], sizes: list[int], like: Tensor, gathers: bool) -> Future[Tensor]:
        """Begin to add: the result is the whole sum if `gathers`, else the chunk that this rank adds.

        `parts` are this rank's nodes, (sum(sizes),) each; `sizes` those of the ranks' chunks. A rank may have
        no parts, so an empty tensor `like` them says their type and device.
        """
        future: Future[Tensor] = Future()
        if like.is_cuda:
            future.set_result(self.reduce_on_stream(parts, sizes, like, gathers))
            return future
        if self.thread is None:
            self.thread = threading.Thread(target=self.serve, daemon=True)
            self.thread.start()
        self.jobs.put((parts, sizes, like, gathers, future))
        return future

    def reduce_on_stream(self, parts: list[Tensor], sizes: list[int], like: Tensor, gathers: bool) -> Tensor:
        """On a stream of their own, NCCL's collectives run beside the backward pass."""
        self.stream = self.stream or torch.cuda.Stream(like.device)
        current = torch.cuda.current_stream(like.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            for tensor in parts:
                tensor.record_stream(self.stream)
            total = self.sum_along_tree(parts, sizes, like, gathers)
        total.record_stream(current)
        return total

    def synchronize(self) -> None:
        """Make the current stream wait for what was queued."""
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

    def sum_along_tree(self, parts: list[Tensor], sizes: list[int], like: Tensor, gathers: bool) -> Tensor:
        """Each rank adds one chunk of all parts along the tree; if `gathers`, all then get all chunks."""
        events.emit("reduction_start")
        my_size = sizes[self.rank]
        incoming = like.new_empty(sum(map(len, self.covers)) * my_size)
        received = [len(nodes) * my_size for nodes in self.covers]
        dist.all_to_all_single(
            incoming, by_rank(parts, sizes, like), received, [len(parts) * other for other in sizes]
        )
        stack: PartialSums[Tensor] = []
        nodes = [node for nodes in self.covers for node in nodes]
        for (level, index), part in zip(nodes, incoming.view(len(nodes), my_size), strict=True):
            push(stack, level, index, part, self.leaves, lambda left, right: left.add_(right))
        ((_, _, total),) = stack
        if not gathers:
            return total if len(nodes) == 1 else total.clone()  # without the memory of all parts
        size, chunk = sum(sizes), max(sizes)
        padded = (
            total.contiguous() if my_size == chunk else torch.cat([total, total.new_zeros(chunk - my_size)])
        )
        gathered = like.new_empty(chunk * len(sizes))
        all_gather_single(gathered, padded)
        return gathered[:size]


def by_rank(parts: list[Tensor], sizes: list[int], like: Tensor) -> Tensor:
    """The parts, cut into chunks of these sizes, rank by rank, as all-to-all sends them."""
    if not parts:
        return like.new_empty(0)
    if len(parts) == 1:
        return parts[0]
    chunks = [part.split(sizes) for part in parts]
    return torch.cat([chunk[rank] for rank in range(len(sizes)) for chunk in chunks])
