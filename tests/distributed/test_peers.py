import os
import subprocess
import sys
import time

from mingpt.distributed.rendezvous import find_local_peers, kill_by_pidfd, open_pidfd, wait_readable

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_siblings_are_found_by_their_rank_and_killed_by_pidfd() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    worker = subprocess.Popen(SLEEP, env=environment | {"RANK": "7"})
    other = subprocess.Popen(SLEEP, env=environment)  # a child of the agent that is no worker
    try:
        found = find_local_peers(os.getpid())
        assert list(found) == [7]
        assert wait_readable(found, 0.0) == []
        kill_by_pidfd(found[7])
        assert wait_readable(found, 10.0) == [7]
        assert worker.wait() == -9 and other.poll() is None
        kill_by_pidfd(found[7])  # it has gone: nothing happens
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()


def test_only_a_child_of_the_agent_gets_a_pidfd() -> None:
    worker = subprocess.Popen(SLEEP)
    try:
        pidfd = open_pidfd(worker.pid, os.getpid())
        assert pidfd is not None
        os.close(pidfd)
        assert open_pidfd(worker.pid, os.getppid()) is None
        assert open_pidfd(worker.pid, None) is None
        assert open_pidfd(os.getpid(), os.getppid()) is None, "not this process itself"
    finally:
        worker.kill()
        worker.wait()
    assert open_pidfd(worker.pid, os.getpid()) is None
    assert find_local_peers(None) == {}


def test_waiting_ends_as_soon_as_one_has_exited() -> None:
    worker = subprocess.Popen([sys.executable, "-c", ""])
    pidfd = open_pidfd(worker.pid, os.getpid())
    assert pidfd is not None
    began = time.monotonic()
    assert wait_readable({3: pidfd}, 30.0) == [3] and time.monotonic() - began < 20
    worker.wait()
    os.close(pidfd)
