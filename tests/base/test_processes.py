import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from support.needs import need, need_proc

from mingpt.base.processes import kill_by_pidfd, open_siblings, wait_readable

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_siblings_are_found_by_their_rank_and_killed_by_pidfd() -> None:
    need_proc()
    need(os, "pidfd_open")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    worker = subprocess.Popen(SLEEP, env=environment | {"RANK": "7"})
    other = subprocess.Popen(SLEEP, env=environment)  # a child of the agent, but no worker
    try:
        found = open_siblings(os.getpid())
        assert list(found) == [7]
        assert open_siblings(os.getppid()) == open_siblings(None) == {}
        assert wait_readable(found, 0.0) == []
        kill_by_pidfd(found[7])
        assert wait_readable(found, 10.0) == [7]
        assert worker.wait() == -9 and other.poll() is None
        kill_by_pidfd(found[7])  # the process has ended: nothing happens
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def refuse(*_: object) -> NoReturn:
    raise PermissionError("Operation not permitted")


def test_without_proc_or_pidfds_no_sibling_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then the backend notices the loss of one."""
    worker = subprocess.Popen(SLEEP, env=os.environ | {"RANK": "7"})
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "glob", lambda *_: iter([]))  # /proc is empty
            assert open_siblings(os.getpid()) == {}
        with monkeypatch.context() as patch:
            patch.setattr(os, "pidfd_open", refuse)  # by a sandbox
            assert open_siblings(os.getpid()) == {}
        monkeypatch.delattr(os, "pidfd_open")
        assert open_siblings(os.getpid()) == {}
    finally:
        worker.kill()
        worker.wait()
