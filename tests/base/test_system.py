import math
import os
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.needs import need, need_proc
from support.small_jobs import Start

from mingpt.base.command import run_command
from mingpt.base.errors import UserError
from mingpt.base.processes import kill_by_pidfd, open_siblings, wait_readable
from mingpt.base.system import (
    OutOfTime,
    allow_open_files,
    cgroup_quota,
    count_oom_kills,
    run_within,
    try_within,
    usable_cores,
)
from mingpt.tools.jobs import ROOT


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


@pytest.mark.parametrize(
    ("place", "function", "what_it_does"),
    [
        (Path, "glob", Mock(return_value=())),  # /proc is empty
        (os, "pidfd_open", Mock(side_effect=PermissionError)),  # by a sandbox
        (os, "pidfd_open", Mock(side_effect=AttributeError)),  # there is no such function
    ],
)
def test_without_proc_or_pidfds_no_sibling_is_found(
    place: object, function: str, what_it_does: Mock, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the backend notices the loss of one."""
    start(["sleep", "60"], RANK="7")
    monkeypatch.setattr(place, function, what_it_does, raising=False)
    assert open_siblings(os.getpid()) == {}
    assert what_it_does.called


# Windows' Python has none of these.
WINDOWS = """
import os, signal, sys
sys.modules |= dict.fromkeys(["fcntl", "grp", "pwd", "resource", "termios"])
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "pthread_sigmask"):
    delattr(signal, name)
for name in ("fork", "geteuid", "getuid", "killpg", "register_at_fork", "sched_getaffinity", "statvfs"):
    delattr(os, name)
"""


@pytest.mark.parametrize("words", ["train.py", "sample.py", "-m mingpt"])
def test_on_windows_every_command_is_one_sentence(words: str, tmp_path: Path) -> None:
    """The commands that pip installs begin as `-m mingpt` does."""
    (tmp_path / "sitecustomize.py").write_text(WINDOWS)
    command = ["env", f"PYTHONPATH={tmp_path}", sys.executable, *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("error: mingpt-distributed does not run on Windows: use WSL .*\n", done.stderr)


def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert run_command(Mock(), []) == 2
    assert capsys.readouterr().err.startswith("error: the working directory cannot be used (No such file")


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


# Prints the page faults of 8 MB in the first thread, and then in another thread.
FAULTS = """
import resource, threading
from mingpt.base.system import keep_freed_memory
from mingpt.distributed import Worker

def touch():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    bytearray(8 << 20)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

Worker()
thread = threading.Thread(target=touch)
keep_freed_memory()
touch()
thread.start()
thread.join()
"""


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({"pod/job": "150000 100000"}, 1.5),
        ({"pod/job": "max 100000", "pod": "200000 100000"}, 2.0),  # a parent's limit counts
        ({"pod/job": "400000 100000", "pod": "200000 100000"}, 2.0),  # the smallest limit counts
        ({"pod/job": "100000 100000", "pod": "200000 100000"}, 1.0),
        ({"pod/job": "300000 100000", "pod": "max 100000"}, 3.0),
        ({"pod/job": "max 100000", ".": "50000 100000"}, 0.5),
        ({"pod/other": "100000 100000", "pod/job": "800000 100000"}, 8.0),  # a neighbour's limit does not
        ({"pod": "700000 100000"}, 7.0),  # there is no file on the lowest level
        ({"pod/job": "damaged", "pod": "600000 100000"}, 6.0),
        ({"pod/job": "max 100000"}, math.inf),
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
    ("text", "kills"), [("pswpout 9\noom_kill 3\nthp 7\n", 3), ("pswpout 9\n", 0), (None, 0)]
)
def test_kills_for_lack_of_memory_are_counted(text: str | None, kills: int, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "vmstat").write_text(text)
    assert count_oom_kills(tmp_path / "vmstat") == kills


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


def test_a_low_limit_of_open_files_is_raised_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (35, hard))
        allow_open_files(workers=2)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (36, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (28, 28))
    with pytest.raises(UserError, match=r"2 workers need 36 open files.* 28 \(ulimit -n\)"):
        allow_open_files(workers=2)


def test_what_a_worker_has_freed_is_used_again_by_all_of_its_threads() -> None:
    """Otherwise glibc returns the memory to the kernel, or keeps it for one thread."""
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    first, other = map(int, done.stdout.split())
    assert other < 0.1 * first
