"""Adds the ranks' partial sums of a bucket along the tree: all-to-all, local additions, all-gather.

These are the bytes of a ring all-reduce; ranks whose micro-batches are no whole subtree send a few more
partial sums. Where all ranks share memory, each adds what lies in the others' segments, and nothing is sent.

Buckets are exchanged one after the other, in a thread or on a stream of their own, beside the backward pass.
Issuing a bucket's all-gather when its all-to-all completes would deadlock, since ranks would meet in
different collectives.
"""

import queue
import threading
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt import events
from mingpt.distributed.shared_memory import SharedMemory
from mingpt.parallel.tree import PartialSums, push

# all_gather_into_tensor is the name before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BucketReducer:
    """`covers` are the nodes of the tree whose sums each rank sends; the tree has `leaves` leaves.

    `memory` is shared by all ranks, if there is any.
    """

    def __init__(
        self,
        covers: list[list[tuple[int, int]]],
        rank: int,
        leaves: int,
        memory: SharedMemory | None = None,
    ) -> None:
        self.covers, self.rank, self.leaves, self.memory = covers, rank, leaves, memory
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.stream: torch.cuda.Stream | None = None
        self.thread: threading.Thread | None = None

    def reduce(
        self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Future[Tensor]:
        """Begin to add: the result is the whole sum if `gathers`, else the chunk that this rank adds.

        `pieces` are vectors, for each of this rank's nodes those that make up its part, (sum(sizes),) in
        all; `sizes` are those of the ranks' chunks. A rank may have no nodes, so an empty tensor `like` them
        says their type and device.
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
        """On a stream of their own, NCCL's collectives run beside the backward pass."""
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

    def sum_along_tree(
        self, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Tensor:
        """Each rank adds one chunk of all parts along the tree; if `gathers`, all then get all chunks."""
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
            return total if count == 1 else total.clone()  # without the memory of all parts
        size, chunk = sum(sizes), max(sizes)
        padded = (
            total.contiguous() if my_size == chunk else torch.cat([total, total.new_zeros(chunk - my_size)])
        )
        gathered = like.new_empty(chunk * len(sizes))
        all_gather_single(gathered, padded)
        return gathered[:size]

    def add(self, parts: list[Tensor]) -> Tensor:
        """The sum of all nodes, in order, in the place of the first."""
        stack: PartialSums[Tensor] = []
        nodes = [node for nodes in self.covers for node in nodes]
        for (level, index), part in zip(nodes, parts, strict=True):
            push(stack, level, index, part, self.leaves, lambda left, right: left.add_(right))
        ((_, _, total),) = stack
        return total

    def sum_in_memory(
        self, memory: SharedMemory, pieces: list[list[Tensor]], sizes: list[int], like: Tensor, gathers: bool
    ) -> Tensor:
        """A segment has a rank's parts. Each rank adds its chunk of all of them, in that of the first."""
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
        if gathers and len(parts) == 2:  # fewer bytes than to share the work, and no second barrier
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
    """The parts, cut into chunks of these sizes, rank by rank, as all-to-all sends them."""
    if not parts:
        return like.new_empty(0)
    if len(parts) == 1:
        return parts[0]
    chunks = [part.split(sizes) for part in parts]
    return torch.cat([chunk[rank] for rank in range(len(sizes)) for chunk in chunks])
