"""A transport for workers that compute on the CPUs of one node: tensors travel through shared memory.

SharedMemoryConnector connects the workers when a job starts, and makes a SharedMemoryTransport. A rank may
own segments, which all ranks map. A segment is a file of `memfd_create`, which is in no folder, so nothing is
left of it once all workers are gone. Peers receive the files through Unix sockets. A rank signals progress by
one byte to each peer. The kernel closes a dead worker's sockets, so that waiting peers notice the death at
once. An exchange looks like this:

    segments.begin(nbytes)
    ... write to `segments.of(rank, ...)`: to this rank's segment, or to parts that no other rank writes ...
    peers.barrier()
    ... read from all segments; perhaps write, and another barrier ...
    peers.end()  # unless something else keeps the next exchange from overwriting the segments
"""

import contextlib
import itertools
import math
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistNetworkError

from mingpt.distributed.group import Group
from mingpt.distributed.transport import Connector, Reduction, Transport

CREDENTIALS = struct.Struct("iii")  # process, user and group, by SO_PEERCRED
GRANULARITY = 1 << 20  # bytes, of which a segment's size is a multiple
MAX_CAPACITY = 1 << 36  # bytes; more than any segment has
MEETING_SHARE = 0.25  # the share of timeout_s for which a rank waits for a peer to connect


class Address(NamedTuple):
    """Where a rank waits for its peers to connect."""

    node: str  # equal for ranks that can share memory
    pid: int
    name: bytes  # of a Unix socket without a file


class Peers:
    """This rank's connections to all other ranks of a job on one node, for one thread at a time.

    `sockets` is {rank: socket}. All ranks call the same methods in the same order, but while one rank calls
    `send_file`, the others call `receive_file`. Methods that wait raise DistNetworkError if a peer is gone,
    or silent for `timeout_s` seconds.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.sockets, self.timeout_s = rank, sockets, timeout_s
        for peer in sockets.values():
            peer.settimeout(timeout_s)
        self.has_ended = False  # this rank has called `end`, and has not yet received the peers' signals

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`.

        Then each rank sees what the other ranks wrote to shared memory before their calls.
        """
        for rank, peer in self.sockets.items():
            self.ask(rank, peer.send, b"\0")
        self.wait()

    def end(self) -> None:
        """Signal to the other ranks that this rank has finished reading; do not wait for their signals.

        Errors are ignored, because a peer that has finished may have exited. If a peer is lost, the next
        exchange notices that.
        """
        for peer in self.sockets.values():
            with contextlib.suppress(OSError):
                peer.send(b"\0")
        self.has_ended = True

    def wait_for_end(self) -> None:
        """If this rank has called `end`, wait until all other ranks have called `end`, too."""
        if self.has_ended:
            self.wait()
            self.has_ended = False

    def wait(self) -> None:
        """Wait for one signal, a byte, from each peer."""
        for rank, peer in self.sockets.items():
            self.ask(rank, peer.recv, 1)

    def send_file(self, file: int) -> None:
        """Send a file, by its descriptor, to all peers."""
        for rank, peer in self.sockets.items():
            self.ask(rank, socket.send_fds, peer, [b"\0"], [file])

    def receive_file(self, rank: int) -> int:
        """Return the descriptor of a file that the peer `rank` sends with `send_file`."""
        peer, flags = self.sockets[rank], socket.MSG_CMSG_CLOEXEC
        return int(self.ask(rank, lambda: socket.recv_fds(peer, 1, 1, flags)[1])[0])

    def ask(self, rank: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call(*arguments)`, which uses the socket to `rank`.

        Raises DistNetworkError if `call` raises OSError, such as a timeout, or if the result is empty, which
        means that the peer has closed the connection.
        """
        try:
            result = call(*arguments)
        except TimeoutError as error:
            what = f"Timed out after {self.timeout_s:g} s waiting for worker {rank}"
            raise DistNetworkError(what) from error
        except OSError as error:
            raise DistNetworkError(f"Connection closed by worker {rank} ({error})") from error
        if not result:
            raise DistNetworkError(f"Connection closed by worker {rank}")
        return result


class Segments:
    """A segment of shared memory for each rank in `owners`; all ranks map all segments.

    `begin` raises the errors of `Peers`, and OSError if a segment cannot be made or mapped.
    """

    def __init__(self, peers: Peers, owners: Sequence[int]) -> None:
        self.peers, self.owners = peers, owners
        self.capacity = 0  # bytes of each segment
        self.maps: dict[int, mmap.mmap] = {}

    def begin(self, nbytes: int) -> None:
        """Call `Peers.wait_for_end`; provide segments for the next exchange. Collective.

        Each segment has at least `nbytes` bytes, a number that must be the same on all ranks. Segments that
        are too small are replaced by new ones; tensors in the old segments stay valid.
        """
        self.peers.wait_for_end()
        if nbytes <= self.capacity:
            return
        self.capacity = -(-nbytes // GRANULARITY) * GRANULARITY
        for rank in self.owners:
            is_mine = rank == self.peers.rank
            file = os.memfd_create("mingpt") if is_mine else self.peers.receive_file(rank)
            try:
                if is_mine:
                    os.ftruncate(file, self.capacity)
                    self.peers.send_file(file)
                self.maps[rank] = mmap.mmap(file, self.capacity)
            finally:
                os.close(file)

    def of(self, rank: int, dtype: torch.dtype, first: int, count: int) -> torch.Tensor:
        """Return a tensor, (count,), whose memory is the segment of `rank` from byte `first` on."""
        if not count:
            return torch.empty(0, dtype=dtype)  # frombuffer refuses an empty one
        return torch.frombuffer(self.maps[rank], dtype=dtype, count=count, offset=first)


class SharedMemoryTransport(Transport):
    """A transport for CPUs of one node.

    The methods that this class overrides, and FSDP2's all-gather, use shared memory; all others use gloo.
    """

    def __init__(self, rank: int, world_size: int, peers: Peers) -> None:
        super().__init__(rank, world_size)
        self.peers, self.segments = peers, Segments(peers, range(world_size))
        self.fsdp_all_gather = SharedAllGather(peers)

    def all_reduce_async(self, tensor: Tensor) -> Callable[[], Tensor]:
        sizes = self.world_size * [tensor.numel()]
        parts = [part.clone() for part in self.all_gather_parts([tensor.flatten()], sizes)]
        total = torch.stack(parts).sum(0, dtype=tensor.dtype).view(tensor.shape)
        return lambda: total

    def all_gather_parts(
        self, pieces: list[Tensor], sizes: list[int], at_once: bool = False
    ) -> Iterator[Tensor]:
        dtype = pieces[0].dtype
        self.segments.begin(max(sizes) * dtype.itemsize)
        torch.cat(pieces, out=self.segments.of(self.rank, dtype, 0, sizes[self.rank]))
        self.peers.barrier()
        for rank, size in enumerate(sizes):
            yield self.segments.of(rank, dtype, 0, size)
        self.peers.end()

    def reduce(self, vectors: list[list[Tensor]], reduction: Reduction) -> Tensor:
        counts, sizes, dtype = reduction.counts, reduction.sizes, reduction.like.dtype
        size, nbytes = sum(sizes), sum(sizes) * dtype.itemsize
        self.segments.begin(max(counts) * nbytes)
        shared = [
            [self.segments.of(rank, dtype, place * nbytes, size) for place in range(count)]
            for rank, count in enumerate(counts)
        ]
        for pieces, own in zip(vectors, shared[self.rank], strict=True):
            torch.cat(pieces, out=own)
        self.peers.barrier()
        gathered = [vector for of_rank in shared for vector in of_rank]
        if reduction.gathers and len(gathered) == 2:
            # Each rank adds all elements: fewer bytes to read than if the ranks shared the work, and only one
            # barrier. A sum of two vectors has the same bits in either order.
            total = gathered[0] + gathered[1]
        else:
            total = reduction.add([vector.split(sizes)[self.rank] for vector in gathered])
            if reduction.gathers:
                self.peers.barrier()  # all ranks have written their chunks of the sum into the first vector
                total = gathered[0]
            total = total.clone()
        self.peers.end()
        return total

    def empty_scattered(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.segments.begin(math.prod(size) * dtype.itemsize)
        return self.segments.of(self.rank, dtype, 0, math.prod(size)).view(*size)

    @contextlib.contextmanager
    def scattered(self, vector: Tensor) -> Iterator[Sequence[Tensor]]:
        self.peers.barrier()
        size = len(vector) // self.world_size
        first_byte = self.rank * size * vector.element_size()
        yield [self.segments.of(rank, vector.dtype, first_byte, size) for rank in range(self.world_size)]
        self.peers.end()


class SharedAllGather:
    """An all-gather for FSDP2, in which all ranks write to the same shared segment, owned by rank 0.

    Two segments are used alternately. A rank begins a gather only after it has copied the result of the
    previous gather. So once all ranks are in a gather, no rank reads the other segment.
    """

    def __init__(self, peers: Peers) -> None:
        self.peers, self.segments = peers, itertools.cycle([Segments(peers, [0]), Segments(peers, [0])])

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        segments, count = next(self.segments), math.prod(size)
        segments.begin(count * dtype.itemsize)
        return segments.of(0, dtype, 0, count).view(*size)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Wait for all ranks. FSDP2 has already copied this rank's input to its place in the output."""
        self.peers.barrier()


class SharedMemoryConnector(Connector):
    """Connects the ranks by shared memory; if that is impossible, `connect` returns a plain Transport.

    The constructor listens on a socket, which `connect` closes. `address` is None if the system refuses to
    share memory.
    """

    def __init__(self) -> None:
        listener, address = listen()
        self.listener: socket.socket | None = listener
        if address:
            self.address = tuple(address)  # since not every rank can unpickle an Address

    def connect(self, group: Group, addresses: Sequence[Any], timeout_s: float) -> Transport:
        known = [Address(*address) for address in addresses if address]
        is_possible = len(known) == group.world_size and len({address.node for address in known}) == 1
        peers = None
        if self.listener and is_possible:
            peers = meet(self.listener, group.rank, known, MEETING_SHARE * timeout_s)
        if self.listener:
            self.listener.close()
        have_met = group.all_gather_object(peers is not None) if is_possible else [False]
        if peers is None or not all(have_met):
            return Transport(group.rank, group.world_size)
        return SharedMemoryTransport(group.rank, group.world_size, Peers(group.rank, peers, timeout_s))


def node() -> str:
    """Return a text that is equal in processes of the same host, user, and pid, net and user namespaces.

    Raises OSError if /proc cannot be read.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user")]
    return " ".join([boot, *namespaces, str(os.geteuid())])


def listen() -> tuple[socket.socket, Address] | tuple[None, None]:
    """Return (a listening Unix socket, its address); (None, None) if the system refuses to share memory."""
    try:
        check_capacity()
        address = Address(node(), os.getpid(), b"\0mingpt-" + secrets.token_hex(16).encode())
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(address.name)
        listener.listen(1024)
    except (OSError, AttributeError):  # a sandbox or a limit may refuse any call; only Linux has memfd_create
        return None, None
    return listener, address


def check_capacity() -> None:
    """Raise OSError if a limit, such as `ulimit -f` or `ulimit -v`, forbids segments of MAX_CAPACITY.

    Raises AttributeError if `os` has no `memfd_create`, as on macOS. The check uses no memory.
    """
    probe = os.memfd_create("mingpt")
    try:
        os.ftruncate(probe, MAX_CAPACITY)
        mmap.mmap(probe, MAX_CAPACITY).close()
    finally:
        os.close(probe)


def meet(
    listener: socket.socket, rank: int, addresses: Sequence[Address], timeout_s: float
) -> dict[int, socket.socket] | None:
    """Connect to all peers; return {rank: socket}, or None if any connection fails or is late. Collective.

    `addresses` are in the order of the ranks, and `timeout_s` limits each wait. Each rank connects to the
    lower ranks and accepts connections of the higher ranks. Any process can find the sockets' names, so each
    rank asks the kernel whether the process at the other end is the peer.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(timeout_s)
            peer.connect(addresses[other].name)
            if process_of(peer) == addresses[other].pid:
                peers[other] = peer
        listener.settimeout(timeout_s)
        missing = {address.pid: other for other, address in enumerate(addresses) if other > rank}
        while missing:
            peer, _ = listener.accept()
            other_rank = missing.pop(process_of(peer), None)
            if other_rank is not None:
                peers[other_rank] = peer
    except OSError:
        return None
    return peers if len(peers) == len(addresses) - 1 else None


def process_of(peer: socket.socket) -> int:
    """Return the id of the process that connected, or began to listen, at the other end of a socket."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return int(CREDENTIALS.unpack(credentials)[0])
