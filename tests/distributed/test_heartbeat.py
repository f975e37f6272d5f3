import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mingpt.base.errors import UserError
from mingpt.distributed import DistributedContext, context


def make_context(is_other_busy: threading.Event) -> Any:
    """The context of a rank whose only peer is busy until the event is set and never loses this rank."""

    def all_gather_object(value: Any) -> list[Any]:
        return [value, (not is_other_busy.is_set(), None) if isinstance(value, tuple) else None]

    made: Any = DistributedContext.__new__(DistributedContext)
    made.world_size, made.threads, made.device, made.agreed_stop = 2, 1, torch.device("cpu"), None
    made.all_gather_object, made.raise_on_all_ranks = all_gather_object, lambda work: work()
    made.stop_signal = SimpleNamespace(reason=None, deferred=True)
    return made


def fail(error: Exception) -> None:
    raise error


def test_an_error_that_others_do_not_know_of_is_raised_though_they_are_busy() -> None:
    """The others' work may wait for this rank, so they must learn that they have lost a peer."""
    other_is_done = threading.Event()
    with pytest.raises(OSError, match="a disk"):
        make_context(other_is_done).run_with_heartbeat(lambda: fail(OSError("a disk")))
    assert not other_is_done.is_set()


def test_an_error_of_the_users_waits_until_all_ranks_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "HEARTBEAT_S", 0.05)
    other_is_done = threading.Event()
    threading.Timer(0.3, other_is_done.set).start()
    with pytest.raises(UserError, match="a token"):
        make_context(other_is_done).run_with_heartbeat(lambda: fail(UserError("a token")))
    assert other_is_done.is_set()
