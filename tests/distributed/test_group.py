import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from support.forks import fork_ranks
from support.ranks import run_ranks

from mingpt.base.errors import StopRequested, UserError
from mingpt.distributed import DistributedContext, group
from mingpt.distributed.group import BackgroundGroup, Group


class Unpicklable(Exception):
    def __reduce__(self) -> NoReturn:
        raise TypeError("it holds a connection")


def fail(error: Exception) -> NoReturn:
    raise error


def on_first(rank: int, work: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: work() if rank == 0 else "other"


class OneOfTwo(Group):
    """The rank 0 of two; the other is busy until the event is set, and never loses this rank."""

    def __init__(self, other_is_done: threading.Event, **signals: Any) -> None:
        super().__init__(0, 2, SimpleNamespace(**({"reason": None, "deferred": True} | signals)))  # type: ignore[arg-type]
        self.other_is_done, self.exchanges = other_is_done, 0

    def all_gather_object(self, value: Any) -> Any:
        self.exchanges += 1
        return [value, ((None, None) if self.other_is_done.is_set() else None, None)]


def test_work_on_one_rank_has_one_outcome_on_all() -> None:
    def work(context: DistributedContext) -> object:
        found = context.on_rank(1, lambda: f"read by {context.rank}")
        by_rank = context.gather_on_all(lambda: 10 * context.rank)
        return found, by_rank, context.on_all(lambda: context.rank)

    assert run_ranks(3, work) == [("read by 1", [0, 10, 20], rank) for rank in range(3)]
    failed = run_ranks(3, lambda context: context.on_rank(1, lambda: fail(UserError("a token"))))
    assert [repr(error) for error in failed] == [repr(UserError("a token"))] * 3


def test_in_the_background_every_error_is_that_of_all_also_if_it_cannot_be_pickled() -> None:
    def work(context: DistributedContext) -> str:
        background = BackgroundGroup(context.rank, context.world_size)
        try:
            background.on_all(on_first(context.rank, lambda: fail(Unpicklable("a bucket"))))
        except OSError as error:
            return str(error)
        return "no error"

    assert fork_ranks(2, work) == ["Unpicklable: a bucket"] * 2


def test_an_error_that_others_do_not_know_of_is_raised_though_they_are_busy() -> None:
    """The others' work may wait for this rank, so they must learn that they have lost a peer."""
    other_is_done = threading.Event()
    ranks = OneOfTwo(other_is_done)
    ranks.shared_errors = UserError
    with pytest.raises(OSError, match="a disk"):
        ranks.on_all(lambda: fail(OSError("a disk")))
    assert not other_is_done.is_set()


def test_an_error_of_the_users_waits_until_all_ranks_are_done() -> None:
    other_is_done = threading.Event()
    threading.Timer(0.3, other_is_done.set).start()
    with pytest.raises(UserError, match="a token"):
        OneOfTwo(other_is_done).on_all(lambda: fail(UserError("a token")))
    assert other_is_done.is_set()


def test_ranks_hear_of_each_other_while_the_work_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "HEARTBEAT_S", 0.05)
    done = threading.Event()
    done.set()
    ranks = OneOfTwo(done)
    ranks.on_all(lambda: time.sleep(0.5))
    assert ranks.exchanges > 2


@pytest.mark.parametrize("deferred", [True, False])
def test_a_request_to_stop_reaches_all_ranks_with_the_work(deferred: bool) -> None:
    def work(context: DistributedContext) -> str | None:
        reason = ("STOP", None, "SIGUSR1")[context.rank]
        context.stop_signal = SimpleNamespace(reason=reason, deferred=deferred)  # type: ignore[assignment]
        context.on_all(lambda: None)
        return context.agreed_stop

    expected = ["SIGUSR1"] * 3 if deferred else [repr(StopRequested("SIGUSR1"))] * 3
    assert [result if deferred else repr(result) for result in run_ranks(3, work)] == expected
