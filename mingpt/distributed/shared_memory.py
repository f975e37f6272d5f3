"""Memory that the workers of one node share for their exchanges on the CPU.

Each rank has a segment that its peers map, too: a file of `memfd_create`, which has no name, so that nothing
is left of it after the last worker has exited or was killed. Peers receive the file through Unix sockets, and
signal their progress by a byte each: 5 us a round between two idle cores. A spinning reader would take the
core of the worker that it waits for. The kernel closes a dead worker's sockets, so its peers notice at once.
"""

import contextlib
import mmap
import os
import secrets
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import torch

CREDENTIALS = struct.Struct("iii")  # process, user and group, by SO_PEERCRED
GRANULARITY = 1 << 20  # bytes, of which a segment's size is a multiple
MAX_CAPACITY = 1 << 36  # bytes; more than any segment has
MEETING_SHARE = 0.25  # share of the time limit, for which the ranks wait for a peer to connect


class SharedMemory:
    """The memory segments of all ranks, for one thread of each. All methods but `of` are collective.

    An exchange is

        memory.begin(nbytes)
        ... write to `memory.of(rank, ...)`: to this rank's segment, or to parts that no other rank writes ...
        memory.barrier()
        ... read from all segments; perhaps write, and another barrier ...
        memory.end()  # unless something else keeps the next exchange from overwriting the segments

    Methods that wait raise DistNetworkError if a peer is gone, or silent for `timeout_s`.
    """

    max_message_bytes = 1 << 16  # a socket takes that many before the peer has read any

    def __init__(self, rank: int, peers: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self.peers, self.timeout_s = rank, peers, timeout_s
        for peer in peers.values():
            peer.settimeout(timeout_s)
        self.capacity = 0  # bytes of each segment
        self.segments: dict[int, mmap.mmap] = {}
        self.has_ended = False  # whether the signals that end an exchange are still to be received

    def begin(self, nbytes: int) -> None:
        """Wait for `end` of all ranks, if this rank has called `end`; make segments of `nbytes` or more.

        `nbytes` is the same on all ranks. Segments that are too small are replaced by new ones; tensors in
        the old segments stay valid.
        """
        self.wait_for_end()
        if nbytes <= self.capacity:
            return
        self.capacity = -(-nbytes // GRANULARITY) * GRANULARITY
        own = os.memfd_create("mingpt")
        try:
            os.ftruncate(own, self.capacity)
            self.segments = {self.rank: mmap.mmap(own, self.capacity)}
            for rank, peer in self.peers.items():
                self.ask(rank, socket.send_fds, peer, [b"\0"], [own])
        finally:
            os.close(own)
        for rank, peer in self.peers.items():
            content, fds, _, _ = self.ask(rank, socket.recv_fds, peer, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not content:
                self.lose(rank)
            try:
                self.segments[rank] = mmap.mmap(fds[0], self.capacity)
            finally:
                os.close(fds[0])

    def barrier(self) -> None:
        """Wait until all ranks have called this. Each then sees the bytes that the others wrote before."""
        for rank, peer in self.peers.items():
            self.ask(rank, peer.send, b"\0")
        self.wait()

    def end(self) -> None:
        """Signal to the other ranks that this rank has finished reading; do not wait for them.

        Errors are ignored, since a peer that has finished may have exited. The next exchange notices a loss.
        """
        for peer in self.peers.values():
            with contextlib.suppress(OSError):
                peer.send(b"\0")
        self.has_ended = True

    def wait_for_end(self) -> None:
        if self.has_ended:
            self.wait()
            self.has_ended = False

    def all_gather(self, content: bytes) -> list[bytes]:
        """Return all ranks' contents, by rank: equally long, up to `max_message_bytes`. Needs no `begin`."""
        assert len(content) <= self.max_message_bytes, "all ranks write before they read"
        self.wait_for_end()
        for rank, peer in self.peers.items():
            self.ask(rank, peer.sendall, content)
        gathered = {self.rank: content}
        for rank, peer in self.peers.items():
            received = b""
            while len(received) < len(content):
                part = self.ask(rank, peer.recv, len(content) - len(received))
                if not part:
                    self.lose(rank)
                received += part
            gathered[rank] = received
        return [gathered[rank] for rank in sorted(gathered)]

    def all_gather_parts(self, own: "torch.Tensor", sizes: Sequence[int]) -> "Iterator[torch.Tensor]":
        """Yield the vector `own` of each rank, with `sizes[rank]` elements; each is valid until the next.

        All ranks must read to the end.
        """
        self.begin(max(sizes) * own.element_size())
        self.of(self.rank, own.dtype, 0, len(own)).copy_(own)
        self.barrier()
        for rank, size in enumerate(sizes):
            yield self.of(rank, own.dtype, 0, size)
        self.end()

    def of(self, rank: int, dtype: "torch.dtype", first: int, count: int) -> "torch.Tensor":
        """Return a view, not a copy, of `count` elements of a rank's segment, from byte `first` on."""
        import torch

        if not count:
            return torch.empty(0, dtype=dtype)  # frombuffer refuses an empty one
        return torch.frombuffer(self.segments[rank], dtype=dtype, count=count, offset=first)

    def wait(self) -> None:
        """Wait for one signal, a byte, from each peer."""
        for rank, peer in self.peers.items():
            content = self.ask(rank, peer.recv, 1)
            if not content:
                self.lose(rank)

    def ask(self, rank: int, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`, on the socket of peer `rank`. Turn OSError into DistNetworkError."""
        from torch.distributed import DistNetworkError

        try:
            return call(*arguments)
        except TimeoutError as error:
            what = f"Timed out after {self.timeout_s:g} s waiting for worker {rank}"
            raise DistNetworkError(what) from error
        except OSError as error:
            raise DistNetworkError(f"Connection closed by worker {rank} ({error})") from error

    def lose(self, rank: int) -> NoReturn:
        from torch.distributed import DistNetworkError

        raise DistNetworkError(f"Connection closed by worker {rank}")


def connect(
    rank: int, all_gather_object: Callable[[Any], list[Any]], is_possible: bool, timeout_s: float
) -> SharedMemory | None:
    """Return memory that all ranks share, or None unless they are on one node that allows it. Collective.

    If `is_possible` is false on one rank, no rank shares memory. `timeout_s` limits each wait for a peer.
    """
    listener = listen() if is_possible else None
    name = listener.getsockname() if listener else b""
    places = all_gather_object((node() if listener else None, os.getpid(), name))
    memory = None
    nodes, pids, names = zip(*places, strict=True)
    if listener and len(set(nodes)) == 1:
        peers = meet(listener, rank, pids, names, MEETING_SHARE * timeout_s)
        if peers:
            memory = SharedMemory(rank, peers, timeout_s)
    if listener:
        listener.close()
    succeeded = all_gather_object(memory is not None)
    return memory if all(succeeded) else None


def node() -> str:
    """Return a name that is equal in processes that can share memory. Raises OSError without /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net", "user")]
    return " ".join([boot, *namespaces, str(os.geteuid())])


def listen() -> socket.socket | None:
    """Return a listening Unix socket without a file; None unless the system allows it and shared memory."""
    if not hasattr(os, "memfd_create"):
        return None
    try:
        node()
        check_capacity()
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(b"\0mingpt-" + secrets.token_hex(16).encode())
        listener.listen(1024)
    except OSError:  # a sandbox or a limit may refuse any of these calls
        return None
    return listener


def check_capacity() -> None:
    """Raise OSError if a segment could not grow, as under `ulimit -f` or `ulimit -v`. Takes no memory."""
    probe = os.memfd_create("mingpt")
    try:
        os.ftruncate(probe, MAX_CAPACITY)
        mmap.mmap(probe, MAX_CAPACITY).close()
    finally:
        os.close(probe)


def meet(
    listener: socket.socket, rank: int, pids: Sequence[int], names: Sequence[bytes], timeout_s: float
) -> dict[int, socket.socket] | None:
    """Connect to all peers; return {rank: socket}, or None if that fails or a peer is late. Collective.

    Each rank connects to the lower ranks; `pids` and `names` (of listening sockets) are by rank. A socket's
    name is no secret, so the kernel is asked whether the process at the other end is the peer.
    """
    peers: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(timeout_s)
            peer.connect(names[other])
            if process_of(peer) == pids[other]:
                peers[other] = peer
        listener.settimeout(timeout_s)
        missing = {pid: other for other, pid in enumerate(pids) if other > rank}
        while missing:
            peer, _ = listener.accept()
            other_rank = missing.pop(process_of(peer), None)
            if other_rank is not None:
                peers[other_rank] = peer
    except OSError:
        return None
    return peers if len(peers) == len(pids) - 1 else None


def process_of(peer: socket.socket) -> int:
    """Return the id of the process that connected, or began to listen, at the other end of a socket."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid: int = CREDENTIALS.unpack(credentials)[0]
    return pid
