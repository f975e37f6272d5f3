"""How tensors travel among the ranks: by gloo or NCCL, or by a faster transport that TRANSPORTS names.

`Transport` has the collectives on tensors. Collectives on Python objects, such as settings and errors, are in
group.py.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.base.extras import load_extra
from mingpt.distributed.group import Group, all_gather_single, wait_for

BROADCAST_BYTES = 64 << 20  # per collective, so that each ends within its timeout
# The name before torch 2.13 is reduce_scatter_tensor.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# By the type of the ranks' devices: a subclass of Connector, as "module:class". The module is imported when a
# job of several ranks starts.
TRANSPORTS = {"cpu": "mingpt.extras.shared_memory:SharedMemoryConnector"}


@dataclass(frozen=True)
class Reduction:
    """How `Transport.reduce` sums the vectors of all ranks. A rank usually sums only its chunk."""

    counts: list[int]  # how many vectors each rank has, perhaps 0
    sizes: list[int]  # how many elements of a vector each rank's chunk has
    like: Tensor  # has the dtype and device of the vectors
    # Gets a chunk of each vector, in the order of the ranks; writes the sum to the first one and returns it.
    add: Callable[[list[Tensor]], Tensor]
    gathers: bool  # whether each rank gets the whole sum, not only its chunk of the sum


class Transport:
    """Collectives on tensors in a process group: gloo for tensors on the CPU, NCCL for those on GPUs.

    All ranks must call all methods in the same order, from one thread at a time. `group` None means torch's
    default group. With one rank, only `scattered` and `reduce_scatter` need a process group. A vector is a
    1-D tensor. A method that takes `pieces`, at least one tensor, concatenates the pieces into a vector.
    """

    fsdp_all_gather: Any = None  # what FSDP2's `set_custom_all_gather` gets; None: FSDP2's own all-gather

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.world_size, self.group = rank, world_size, group

    def with_own_group(self, timeout_s: float) -> "Transport":
        """Return a copy of this transport with a new process group, for use by another thread. Collective.

        `timeout_s` limits each collective of the new group. In a subclass, the copy shares all but the group
        with this transport, so two threads must not use the two transports at the same time. Without a
        launcher, also initializes torch's default process group.
        """
        if not dist.is_initialized():  # without a launcher
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        other = copy.copy(self)
        other.group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        return other

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy `tensor` of rank `source` into `tensor` of the other ranks. The tensors must be contiguous."""
        for work in self.begin_broadcast(tensor, source):
            wait_for(work)

    def begin_broadcast(self, tensor: Tensor, source: int) -> list[dist.Work | None]:
        """Start a `broadcast`. Use `tensor` only after calling `wait_for` for each of the returned works."""
        works = []
        if self.world_size > 1 and tensor.numel():
            for piece in tensor.view(-1).split(max(1, BROADCAST_BYTES // tensor.element_size())):
                works.append(dist.broadcast(piece, source, self.group, async_op=True))
        return works

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Start to sum `tensor` over the ranks; return a function that waits and returns the sum.

        In a subclass, this call itself may wait. `tensor` may be overwritten. The backend chooses the order
        of the additions. The result's bits do not depend on that order if nothing is rounded, for example if
        all ranks but one have zeros.
        """
        work = dist.all_reduce(tensor, group=self.group, async_op=True) if self.world_size > 1 else None

        def wait() -> Tensor:
            if work is not None:
                wait_for(work)
            return tensor

        return wait

    def all_gather(self, vector: Tensor, length: int) -> Tensor:
        """Return the vectors of all ranks, (world_size, length); shorter vectors are padded with zeros."""
        missing = length - len(vector)
        padded = torch.cat([vector, vector.new_zeros(missing)]) if missing else vector
        if self.world_size == 1:
            return padded.unsqueeze(0)
        gathered = vector.new_empty(self.world_size, length)
        all_gather_single()(gathered.flatten(), padded, group=self.group)
        return gathered

    def all_gather_parts(
        self, pieces: list[Tensor], sizes: list[int], at_once: bool = False
    ) -> Iterator[Tensor]:
        """Yield the vectors of all ranks, in the order of the ranks; `sizes` has their numbers of elements.

        `pieces` are the pieces of this rank's vector. A yielded vector is valid until the iteration goes on.
        All ranks must iterate to the end. With `at_once`, one collective gathers all vectors, padded
        to the longest: use `at_once` only for vectors of about equal sizes. Without `at_once`, each vector is
        broadcast, and yielded when it has arrived. A subclass may ignore `at_once`.
        """
        own = torch.cat(pieces)
        if at_once:
            gathered = self.all_gather(own, max(sizes))
            yield from (row[:size] for row, size in zip(gathered, sizes, strict=True))
            return
        parts = [own if rank == self.rank else own.new_empty(size) for rank, size in enumerate(sizes)]
        begun = [self.begin_broadcast(part, rank) for rank, part in enumerate(parts)]
        for part, works in zip(parts, begun, strict=True):
            for work in works:
                wait_for(work)
            yield part

    def all_to_all(self, pieces: list[Tensor], send: list[int], receive: list[int]) -> Tensor:
        """Send to each rank its share of this rank's vector; return the elements that this rank receives.

        The first `send[0]` elements of the vector go to rank 0, the next `send[1]` elements to rank 1, and so
        on. `receive[rank]` is the number of elements that `rank` sends to this rank. In the result, the
        elements are in the order of the ranks.
        """
        vector = torch.cat(pieces)
        if self.world_size == 1:
            return vector
        received = vector.new_empty(sum(receive))
        dist.all_to_all_single(received, vector, receive, send, group=self.group)
        return received

    def reduce(self, vectors: list[list[Tensor]], reduction: Reduction) -> Tensor:
        """Return the sum of all ranks' vectors if `reduction.gathers`, else this rank's chunk of that sum.

        `vectors` has the vectors of this rank, each as a list of pieces.
        """
        counts, sizes = reduction.counts, reduction.sizes
        count, my_size = sum(counts), sizes[self.rank]
        pieces = vectors[0] if len(vectors) == 1 else chunks_by_rank(vectors, reduction)
        received = self.all_to_all(
            pieces, [len(vectors) * size for size in sizes], [other * my_size for other in counts]
        )
        total = reduction.add(list(received.view(count, my_size)))
        if reduction.gathers:
            return self.all_gather(total, max(sizes)).flatten()[: sum(sizes)]
        return total if count == 1 else total.clone()  # a view would keep the memory of all chunks

    def empty_scattered(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor of shape `size`, which the caller fills and gives to `scattered`."""
        return torch.empty(size, dtype=dtype, device=device)

    @contextmanager
    def scattered(self, vector: Tensor) -> Iterator[Sequence[Tensor]]:
        """Yield this rank's chunk of each rank's `vector`, in the order of the ranks.

        `vector` is a 1-D view of a tensor from `empty_scattered`. Inside the `with` block the caller may
        read and overwrite the chunks. All chunks have the same size: that of `vector` divided by the number
        of ranks.
        """
        received = torch.empty_like(vector)
        dist.all_to_all_single(received, vector, group=self.group)
        yield received.view(self.world_size, -1).unbind()

    def reduce_scatter(self, chunk: Tensor, vector: Tensor, op: Any) -> None:
        """Reduce the ranks' vectors with the ReduceOp `op`; write this rank's chunk of the result to `chunk`.

        The backend chooses the order of the additions.
        """
        reduce_scatter_single(chunk, vector, op=op, group=self.group)


def chunks_by_rank(vectors: list[list[Tensor]], reduction: Reduction) -> list[Tensor]:
    """Return the chunks of this rank's vectors, sorted by the rank that receives them, then by vector.

    Each vector is given as a list of pieces, and is split into chunks of `reduction.sizes` elements. An empty
    tensor comes first, so that the returned list is not empty if there are no vectors.
    """
    chunks = [torch.cat(pieces).split(reduction.sizes) for pieces in vectors]
    empty = reduction.like.new_empty(0)
    return [empty, *(chunk for of_rank in zip(*chunks, strict=True) for chunk in of_rank)]


class Connector:
    """Makes a rank's transport when a job starts: a plain Transport, or in a subclass perhaps a faster one.

    `address` is what other ranks need to reach this rank, or None if this rank can use only a plain
    Transport. An address has only Python's own types, so that ranks whose copy of the program lacks the
    subclass can unpickle the address.
    """

    address: object = None

    def connect(self, group: Group, addresses: Sequence[Any], timeout_s: float) -> Transport:
        """Return the transport of this rank of `group`. Collective.

        `addresses` has the `address` of each rank, in the order of the ranks. If any address is None, the
        ranks exchange nothing, and all return a plain Transport. `timeout_s` limits each wait for a peer.
        """
        return Transport(group.rank, group.world_size)


def make_connector(device_type: str, world_size: int) -> Connector:
    """Return the Connector that TRANSPORTS names for ranks on devices of the type `device_type`.

    Returns a plain Connector if TRANSPORTS names none, if its module is missing, or if there is only one
    rank.
    """
    make = None
    if world_size > 1 and device_type in TRANSPORTS:
        make = load_extra(TRANSPORTS[device_type])
    return make() if make else Connector()
