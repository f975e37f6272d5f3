import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.needs import need, need_proc

from mingpt.base.processes import kill_by_pidfd, open_siblings, wait_readable

Sleeper = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """A function that starts a process that sleeps, with RANK only if it is given."""
    started: list[subprocess.Popen[bytes]] = []
    rest = {name: value for name, value in os.environ.items() if name != "RANK"}

    def start(**variables: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(["sleep", "60"], env=rest | variables))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_siblings_are_found_by_their_rank_and_killed_by_pidfd(sleeper: Sleeper) -> None:
    need_proc()
    need(os, "pidfd_open")
    worker, other = sleeper(RANK="7"), sleeper()  # other: a child of the agent, but no worker
    found = open_siblings(os.getpid())
    assert list(found) == [7]
    assert open_siblings(os.getppid()) == open_siblings(None) == {}
    assert wait_readable(found, 0.0) == []
    kill_by_pidfd(found[7])
    assert wait_readable(found, 10.0) == [7]
    assert worker.wait() == -9 and other.poll() is None
    kill_by_pidfd(found[7])  # the process has ended: nothing happens


@pytest.mark.parametrize(
    ("place", "function", "what_it_does"),
    [
        (Path, "glob", Mock(return_value=())),  # /proc is empty
        (os, "pidfd_open", Mock(side_effect=PermissionError)),  # by a sandbox
        (os, "pidfd_open", Mock(side_effect=AttributeError)),  # there is no such function
    ],
)
def test_without_proc_or_pidfds_no_sibling_is_found(
    place: object, function: str, what_it_does: Mock, sleeper: Sleeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the backend notices the loss of one."""
    sleeper(RANK="7")
    monkeypatch.setattr(place, function, what_it_does, raising=False)
    assert open_siblings(os.getpid()) == {}
    assert what_it_does.called
