"""Real ranks of this machine that share memory, and the errors they raise if a peer is gone or frozen."""

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from support.forks import fork_ranks, results_of, share_memory
from support.jobs import need, need_proc

from mingpt.distributed import DistributedContext
from mingpt.distributed.exit import is_lost_peer
from mingpt.distributed.transport import Transport
from mingpt.extras import shared_memory
from mingpt.extras.shared_memory import SharedMemoryTransport

TIMEOUT_S = 10.0


def need_shared_memory() -> None:
    need_proc()  # it tells ranks of one node
    need(os, "memfd_create")


def connected(context: DistributedContext, timeout_s: float = TIMEOUT_S) -> SharedMemoryTransport:
    need_shared_memory()
    carrier = share_memory(context, timeout_s)
    assert isinstance(carrier, SharedMemoryTransport)
    return carrier


def exchange(context: DistributedContext) -> list[bool]:
    """Whether parts and sums arrive as they are, by gloo and by the segments, in rounds of other sizes."""
    as_expected = []
    for carrier in (Transport(context.rank, context.world_size), connected(context)):
        for longest, at_once in itertools.product((3, 1, 100_000), (False, True)):
            sizes = [0, *range(longest, longest + context.world_size - 1)]
            own = torch.full((sizes[context.rank],), context.rank, dtype=torch.bfloat16)
            parts = carrier.all_gather_parts(list(own.split(5)), sizes, at_once)
            for rank, (size, part) in enumerate(zip(sizes, parts, strict=True)):
                as_expected.append(part.shape == (size,) and bool((part == rank).all()))
            total = carrier.all_reduce_async(torch.full((2, longest), 2**context.rank, dtype=torch.uint8))
            as_expected.append(total().equal(torch.full((2, longest), 2**context.world_size - 1).byte()))
    context.all_gather_object(None)  # wait for all, since a rank that ends early is a lost peer
    return as_expected


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_several_sizes_and_sums_reach_all_ranks(ranks: int) -> None:
    """One of the parts has no elements."""
    assert results_of(ranks, exchange) == [12 * (ranks + 1) * [True]] * ranks


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
    work = partial(lose_rank_1, kind=kind, timeout_s=timeout_s, message=message)
    noticed_s, _ = fork_ranks(2, work)
    assert isinstance(noticed_s, float) and least_s <= noticed_s < TIMEOUT_S / 2


def falls_back(context: DistributedContext, spoil: Callable[[], object]) -> bool:
    """Whether this rank gets gloo's transport, once rank 1 alone has called `spoil`."""
    if context.rank == 1:
        spoil()
    return type(share_memory(context, 4.0)) is Transport


@pytest.mark.parametrize(
    "spoil",
    [
        partial(vars(os).pop, "memfd_create", None),
        partial(setattr, shared_memory, "node", Mock(return_value="another")),
        # A sandbox that allows making sockets but not connecting them.
        partial(setattr, shared_memory, "meet", Mock(return_value=None)),
        # The module can neither be imported, nor can its types be unpickled.
        partial(vars(sys)["modules"].update, {"mingpt.extras.shared_memory": None}),
    ],
    ids=["no memfd", "another node", "no connection", "no module"],
)
def test_where_one_rank_cannot_no_rank_does(spoil: Callable[[], object]) -> None:
    assert results_of(3, partial(falls_back, spoil=spoil)) == [True] * 3
