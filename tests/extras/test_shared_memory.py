"""Real ranks of this machine that share memory, and the errors they raise if a peer is gone or frozen."""

import functools
import glob
import itertools
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable

import pytest
import torch
from support.forks import fork_ranks, results_of, share_memory
from support.needs import need, need_proc

from mingpt.distributed import DistributedContext
from mingpt.distributed.exit import is_lost_peer
from mingpt.distributed.transport import Transport
from mingpt.extras import shared_memory
from mingpt.extras.shared_memory import Address, Peers, Segments, SharedMemoryTransport, listen, meet

TIMEOUT_S = 10.0


def need_shared_memory() -> None:
    need_proc()  # it tells ranks of one node
    need(os, "memfd_create")


def connected(context: DistributedContext, timeout_s: float = TIMEOUT_S) -> SharedMemoryTransport:
    need_shared_memory()
    carrier = share_memory(context, timeout_s)
    assert isinstance(carrier, SharedMemoryTransport)
    return carrier


def exchange_numbers(context: DistributedContext) -> list[list[float]]:
    """The numbers that this rank reads in all segments, round by round; segments grow from round to round.

    Between the rounds the ranks sum up a vector in other segments.
    """
    carrier, rounds, kept = connected(context), [], []
    segments = Segments(carrier.peers, range(context.world_size))
    for count in (3, 10, 10, 1_000_000):
        segments.begin(8 * count)
        segments.of(context.rank, torch.float64, 8, count - 1).fill_(100 * context.rank + count)
        carrier.peers.barrier()
        seen = [segments.of(rank, torch.float64, 8, count - 1) for rank in range(context.world_size)]
        rounds.append([float(part.max()) for part in seen])
        kept.append(seen)
        carrier.peers.end()
        total = carrier.all_reduce_async(torch.full((2, count), 2**context.rank, dtype=torch.uint8))
        assert total().equal(torch.full((2, count), 2**context.world_size - 1, dtype=torch.uint8))
    assert float(kept[0][1].max()) == 110, "tensors keep the segment that they lie in"
    context.all_gather_object(None)  # wait for all, since a rank that ends early is a lost peer
    return rounds


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_after_a_barrier_all_ranks_see_what_each_has_written(ranks: int) -> None:
    expected = [[100.0 * rank + count for rank in range(ranks)] for count in (3, 10, 10, 1_000_000)]
    assert results_of(ranks, exchange_numbers) == [expected] * ranks


def gather_parts(context: DistributedContext) -> list[bool]:
    """Whether each rank's part arrives unchanged, by gloo and by the segments, in rounds of other sizes."""
    as_expected = []
    for carrier in (Transport(context.rank, context.world_size), connected(context)):
        for longest, at_once in itertools.product((1, 7, 100_000), (False, True)):
            sizes = [0, *range(longest, longest + context.world_size - 1)]
            own = torch.full((sizes[context.rank],), context.rank, dtype=torch.bfloat16)
            parts = carrier.all_gather_parts(list(own.split(5)), sizes, at_once)
            for rank, (size, part) in enumerate(zip(sizes, parts, strict=True)):
                as_expected.append(part.shape == (size,) and bool((part == rank).all()))
    context.all_gather_object(None)
    return as_expected


@pytest.mark.parametrize("ranks", [2, 3])
def test_parts_of_several_sizes_reach_all_ranks(ranks: int) -> None:
    """One of the parts has no elements."""
    assert results_of(ranks, gather_parts) == [12 * ranks * [True]] * ranks


def end_after_rank_0_has_gone(context: DistributedContext) -> bool:
    """Rank 0 has read all that it needs, and leaves before the other ranks have read their numbers."""
    carrier = connected(context)
    carrier.segments.begin(8)
    carrier.peers.barrier()
    if context.rank == 0:
        carrier.peers.end()
        carrier.peers.sockets[1].close()
    context.all_gather_object(None)
    if context.rank == 1:
        carrier.peers.end()
        carrier.segments.begin(8)  # rank 0 had already ended
        with pytest.raises(Exception, match="Connection closed by worker 0"):
            carrier.peers.barrier()
    return True


def test_a_peer_may_leave_once_it_has_read() -> None:
    assert all(results_of(2, end_after_rank_0_has_gone))


def lose_rank_1(context: DistributedContext, kind: signal.Signals, timeout_s: float, message: str) -> float:
    """The seconds until the ranks notice that rank 1 got this signal; rank 0 wakes it afterwards."""
    peers, pids = connected(context, timeout_s).peers, context.all_gather_object(os.getpid())
    if context.rank == 1:
        os.kill(os.getpid(), kind)
        return 0.0
    began = time.monotonic()
    with pytest.raises(Exception, match=message) as raised:
        peers.barrier()
    assert is_lost_peer(raised.value)
    os.kill(pids[1], signal.SIGCONT)
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("kind", "timeout_s", "message", "least_s"),
    [
        (signal.SIGKILL, TIMEOUT_S, "Connection closed by worker 1", 0.0),
        (signal.SIGSTOP, 1.0, "Timed out after 1 s waiting for worker 1", 1.0),
    ],
)
def test_a_killed_peer_is_noticed_at_once_and_a_frozen_one_after_the_time_limit(
    kind: signal.Signals, timeout_s: float, message: str, least_s: float
) -> None:
    work = functools.partial(lose_rank_1, kind=kind, timeout_s=timeout_s, message=message)
    noticed_s, _ = fork_ranks(2, work)
    assert isinstance(noticed_s, float) and least_s <= noticed_s < TIMEOUT_S / 2


def without_memfd_on_rank_1(context: DistributedContext) -> bool:
    if context.rank == 1:
        vars(os).pop("memfd_create", None)
    return type(share_memory(context)) is Transport


def on_another_node(context: DistributedContext) -> bool:
    if context.rank == 1:
        shared_memory.node = lambda: "another"
    return type(share_memory(context)) is Transport


def refused_on_rank_1(context: DistributedContext) -> bool:
    """Rank 1 behaves as in a sandbox that allows making sockets but not connecting them."""
    if context.rank == 1:
        vars(shared_memory)["meet"] = lambda *_: None
    return type(share_memory(context, 4.0)) is Transport


def without_the_extra_on_rank_1(context: DistributedContext) -> bool:
    """Rank 1 can neither import the module nor unpickle its types."""
    if context.rank == 1:
        sys.modules["mingpt.extras.shared_memory"] = None  # type: ignore[assignment]
    return type(share_memory(context)) is Transport


def limited_on_rank_1(context: DistributedContext, limit: int) -> bool:
    """Rank 1 may make a segment, but not a large one."""
    if context.rank == 1:
        resource.setrlimit(limit, (1 << 33, -1))
    return type(share_memory(context)) is Transport


@pytest.mark.parametrize(
    "work",
    [
        without_memfd_on_rank_1,
        on_another_node,
        refused_on_rank_1,
        without_the_extra_on_rank_1,
        functools.partial(limited_on_rank_1, limit=resource.RLIMIT_FSIZE),  # ulimit -f
        functools.partial(limited_on_rank_1, limit=resource.RLIMIT_AS),  # ulimit -v
    ],
)
def test_where_one_rank_cannot_no_rank_does(work: Callable[[DistributedContext], bool]) -> None:
    assert results_of(3, work) == [True] * 3


def meet_as_rank_1(rank_0: Address) -> None:
    own, address = listen()
    assert own is not None and address is not None
    peers = meet(own, 1, [rank_0, address], TIMEOUT_S)
    assert peers is not None
    peers[0].send(b"\1")


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return pid


def test_a_process_that_is_no_peer_is_turned_away() -> None:
    """The process has found the name, and comes first."""
    need_shared_memory()
    listener, address = listen()
    assert listener is not None and address is not None
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(address.name)
    peer = fork(lambda: meet_as_rank_1(address))
    peers = meet(listener, 0, [address, Address(address.node, peer, address.name)], TIMEOUT_S)
    assert peers is not None and list(peers) == [1]
    assert peers[1].recv(1) == b"\1"
    assert stranger.recv(1) == b"", "its connection has been closed"
    os.waitpid(peer, 0)


def open_segments() -> list[str]:
    """This process's descriptors of files in memory; threads of other tests open and close other files."""
    return sorted(path for path in glob.glob("/proc/self/fd/*") if "memfd:" in os.path.realpath(path))


def test_a_segment_that_cannot_be_made_leaves_no_open_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "ftruncate", lambda *_: 1 / 0)
    before = open_segments()
    with pytest.raises(ZeroDivisionError):
        Segments(Peers(0, {}, 1.0), [0]).begin(1)
    assert open_segments() == before
