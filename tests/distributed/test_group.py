import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.forks import fork_ranks
from support.jobs import wait_until
from support.ranks import run_ranks
from torch.distributed import TCPStore

from mingpt.base.errors import PeersMissing, StopRequested, UserError
from mingpt.distributed import DistributedContext, Launch, group
from mingpt.distributed.rendezvous import Rendezvous


def fail(error: Exception) -> None:
    raise error


def test_an_error_that_others_do_not_know_of_is_raised_though_they_are_busy() -> None:
    """The others' work may wait for this rank, so they must learn that they have lost a peer."""
    is_lost = threading.Event()

    def work(context: DistributedContext) -> None:
        try:
            context.on_all(lambda: is_lost.wait(20) if context.rank else fail(OSError("a disk")))
        finally:
            is_lost.set()
            context.barrier.abort()  # type: ignore[attr-defined]

    assert [type(error) for error in run_ranks(2, work)] == [OSError, threading.BrokenBarrierError]


def test_an_error_of_the_users_is_raised_on_all_ranks_once_all_are_done() -> None:
    def work(context: DistributedContext) -> float:
        began = time.monotonic()
        with pytest.raises(UserError, match="a token"):
            context.on_all(lambda: fail(UserError("a token")) if context.rank else time.sleep(0.3))
        return time.monotonic() - began

    assert min(run_ranks(2, work)) > 0.2  # type: ignore[type-var, operator]


@pytest.mark.parametrize(("deferred", "error"), [(True, type(None)), (False, StopRequested)])
def test_a_request_to_stop_reaches_all_ranks_during_the_work(
    monkeypatch: pytest.MonkeyPatch, deferred: bool, error: type
) -> None:
    monkeypatch.setattr(group, "HEARTBEAT_S", 0.05)

    def work(context: DistributedContext) -> None:
        signals: Any = SimpleNamespace(reason=("STOP", None, "SIGUSR1")[context.rank], deferred=deferred)
        context.stop_signal = signals

        def wait() -> None:
            time.sleep(0.5)
            assert context.agreed_stop == "SIGUSR1"  # the first of REASONS

        context.on_all(wait)

    assert [type(result) for result in run_ranks(3, work)] == [error] * 3


def test_objects_of_any_size_reach_all_ranks() -> None:
    """A small object takes one collective, the rest of a larger one another."""
    sizes = [0, group.FIRST_BYTES - 200, group.FIRST_BYTES, 3_000_000]

    def work(context: DistributedContext) -> list[bytes]:
        found = list[bytes]()
        for shift in range(len(sizes)):
            found += context.all_gather_object(bytes([context.rank]) * sizes[context.rank - shift])
        return found

    expected = [bytes([rank]) * sizes[rank - shift] for shift in range(4) for rank in range(4)]
    assert fork_ranks(4, work) == [expected] * 4


@pytest.fixture
def store() -> TCPStore:
    """The store of an agent."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def meet(store: TCPStore, workers: int, rank: int, timeout_s: float = 10.0, **known: Any) -> Rendezvous:
    place: dict[str, Any] = {"master_addr": "127.0.0.1", "master_port": store.port, "agent_hosts_store": True}
    return Rendezvous(Launch(rank=rank, world_size=workers, **place, **known), timeout_s)


def test_a_store_tells_only_of_the_generation_right_before(store: TCPStore) -> None:
    """The store lives in an agent that may have been away while another agent led the job."""
    known = [meet(store, 1, 0, rdzv_round=number).previous_generation is not None for number in (1, 2, 4, 5)]
    assert known == [False, True, False, True]


@pytest.mark.parametrize(("there", "missing"), [((0, 1), [2]), ((1, 2), [0])])
def test_the_ranks_that_do_not_come_are_named_by_all_that_wait(
    there: tuple[int, int], missing: list[int], store: TCPStore
) -> None:
    """If rank 0 does not come, nobody knows who else is missing."""
    with ThreadPoolExecutor() as pool:
        for worker in [pool.submit(meet, store, 3, rank, 1.0) for rank in there]:
            with pytest.raises(PeersMissing) as error:
                worker.result()
            assert error.value.ranks == missing


def test_a_worker_is_answered_although_a_dead_one_of_its_rank_has_asked_before(store: TCPStore) -> None:
    store.set("hello/1", "dead")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(meet, store, 2, 0)
        wait_until(lambda: store.check(["answer/dead"]))
        assert meet(store, 2, 1).generation == first.result().generation
