import os
import subprocess
import sys

from mingpt.distributed.rendezvous import find_local_peers, kill_by_pidfd, wait_readable

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_siblings_are_found_by_their_rank_and_killed_by_pidfd() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    worker = subprocess.Popen(SLEEP, env=environment | {"RANK": "7"})
    other = subprocess.Popen(SLEEP, env=environment)  # a child of the agent, but no worker
    try:
        found = find_local_peers(os.getpid())
        assert list(found) == [7]
        assert find_local_peers(os.getppid()) == find_local_peers(None) == {}
        assert wait_readable(found, 0.0) == []
        kill_by_pidfd(found[7])
        assert wait_readable(found, 10.0) == [7]
        assert worker.wait() == -9 and other.poll() is None
        kill_by_pidfd(found[7])  # the process has ended: nothing happens
    finally:
        for process in (worker, other):
            process.kill()
            process.wait()
