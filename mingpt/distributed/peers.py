"""The other workers of this worker's agent: found in /proc, watched and killed by pidfd. Linux only."""

import contextlib
import os
import select
import signal
from collections.abc import Mapping
from pathlib import Path


def parent_pid(pid: int) -> int | None:
    """The process id of a process's parent, where the system says."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def open_pidfd(pid: int, agent_pid: int | None) -> int | None:
    """A pidfd of a child of the agent, which never refers to a later process; None if it is none."""
    if agent_pid is None or pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return None  # it has gone, or this kernel does not allow it: then the agent kills it
    if parent_pid(pid) == agent_pid:  # asked after opening, so it is this very process's parent
        return pidfd
    os.close(pidfd)
    return None


def find_local_peers(agent_pid: int | None) -> dict[int, int]:
    """{rank: pidfd} of the agent's other children that have a rank."""
    found: dict[int, int] = {}
    if agent_pid is None:
        return found
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        if parent_pid(pid) != agent_pid:
            continue
        pidfd = open_pidfd(pid, agent_pid)
        if pidfd is None:
            continue
        rank = rank_of(pid)
        if rank is None:
            os.close(pidfd)
        else:
            found[rank] = pidfd
    return found


def rank_of(pid: int) -> int | None:
    """The RANK that a process was started with."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")]
    return ranks[0] if ranks else None


def wait_readable(fds: Mapping[int, int], timeout_s: float) -> list[int]:
    """The keys of those file descriptors that are readable; waits for one. A pidfd is once it has exited."""
    poller = select.poll()
    keys = {fd: key for key, fd in fds.items()}
    for fd in keys:
        poller.register(fd, select.POLLIN)
    return [keys[fd] for fd, _ in poller.poll(1000 * timeout_s)]


def kill(pidfd: int) -> None:
    with contextlib.suppress(OSError):  # it has gone
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
