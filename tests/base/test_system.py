import math
import os
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.jobs import Start, need, need_proc

from mingpt.base.processes import kill_by_pidfd, open_siblings, read_stat, wait_readable
from mingpt.base.system import OutOfTime, cgroup_quota, run_within, try_within, usable_cores


def test_siblings_are_found_by_their_rank_and_killed_by_pidfd(start: Start) -> None:
    need_proc()
    need(os, "pidfd_open")
    worker, other = start(["sleep", "60"], RANK="7"), start(["sleep", "60"])  # other: no worker
    found = open_siblings(os.getpid())
    assert list(found) == [7]
    assert open_siblings(os.getppid()) == open_siblings(None) == {}
    assert wait_readable(found, 0.0) == []
    kill_by_pidfd(found[7])
    assert wait_readable(found, 10.0) == [7]
    assert worker.wait() == -9 and other.is_running()
    kill_by_pidfd(found[7])  # the process has ended: nothing happens
    assert read_stat(2**22 + 1) == (None, None, None)  # no process has this id


@pytest.mark.skipif(not os.path.exists("/proc/self/comm"), reason="needs Linux")
def test_a_process_may_have_any_bytes_in_its_name() -> None:
    name, before = Path("/proc/self/comm"), read_stat(os.getpid())
    own_name = name.read_bytes()
    name.write_bytes(b"a name cut \xc3) R")
    try:
        assert read_stat(os.getpid())[1:] == before[1:] != (None, None)
    finally:
        name.write_bytes(own_name)


def test_work_gives_its_result_or_its_error_in_time_or_is_given_up() -> None:
    """If the work itself times out, that is not taken for the end of the limit."""
    hangs = threading.Event()
    assert run_within(30, lambda: "done") == "done" and try_within(30, lambda: None)
    with pytest.raises(TimeoutError, match="of the store"):
        run_within(30, Mock(side_effect=TimeoutError("of the store")))
    with pytest.raises(OutOfTime, match=r"^not done within 0\.2 s$"):
        run_within(0.2, hangs.wait)
    assert not try_within(0.2, hangs.wait)
    hangs.set()


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"pod/job": "150000 100000"}, 1.5),
        ({"pod/job": "max 100000", "pod": "200000 100000"}, 2.0),  # a parent's limit counts
        ({"pod/job": "400000 100000", "pod": "200000 100000"}, 2.0),  # the smallest limit counts
        ({}, math.inf),
    ],
)
def test_the_smallest_quota_of_a_cgroup_and_those_above_it_counts(
    limits: dict[str, str], cores: float, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/job\n")
    for folder, limit in limits.items():
        place = tmp_path / "mount" / folder
        place.mkdir(parents=True, exist_ok=True)
        (place / "cpu.max").write_text(limit + "\n")
    assert cgroup_quota(tmp_path / "cgroup", tmp_path / "mount") == pytest.approx(cores)


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"),
    [
        (Mock(return_value=range(6)), 3.9, 3),
        (Mock(return_value=range(6)), 1e9, 6),
        (Mock(return_value=range(6)), 0.5, 1),
        (Mock(side_effect=AttributeError), math.inf, 4),  # no Linux, such as a Mac
        (Mock(side_effect=PermissionError), math.inf, 4),  # a sandbox
    ],
)
def test_the_affinity_else_all_cores_and_the_quota_limit_the_usable_cores(
    affinity: Mock, quota: float, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", affinity, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr("mingpt.base.system.cgroup_quota", lambda *_: quota)
    assert usable_cores() == cores
