"""Identify processes across machines and across reuse of their ids; watch and kill sibling processes.

Siblings are the other children of this process's parent. They are watched and killed by their pidfds, which
only Linux has.
"""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

MAX_PID = 2**31


@dataclass(frozen=True)
class Process:
    """A process on a machine; `start_time`, if known, distinguishes it from a later one with the same id."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}  # pydantic is imported late: it takes a while
    host: str
    machine: str  # from `this_machine`: one boot and one pid namespace, within which process ids are valid
    pid: int
    start_time: str | None  # in clock ticks since the machine's boot; None if the system does not tell

    def __post_init__(self) -> None:
        if not 0 < self.pid < MAX_PID:
            raise ValueError("this is not a process id")

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; a zombie is not.

        Returns None if the process has another `machine` than the caller, or if `start_time` is known but
        /proc does not show the process.
        """
        if self.machine != this_machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process of another user
        state, _, start_time = read_stat(self.pid)
        if state is None and self.start_time is not None:
            return None  # /proc hides it
        return state != "Z" and start_time == self.start_time


def this_process(pid: int | None = None) -> Process:
    """Return the Process with id `pid` on this machine, by default the calling process."""
    pid = os.getpid() if pid is None else pid
    return Process(socket.gethostname(), this_machine(), pid, read_stat(pid)[2])


def this_machine() -> str:
    """Return a name for the machine's boot and pid namespace, within which process ids are valid.

    Without Linux's /proc, return the host's name.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()  # no Linux


def read_stat(pid: int) -> tuple[str, str, str] | tuple[None, None, None]:
    """Return the state, the parent's id and the start time (in clock ticks since boot) from /proc/PID/stat.

    Returns (None, None, None) if the file cannot be read, for example because the process is gone.
    """
    try:
        # A process may have any bytes as its name.
        fields = Path(f"/proc/{pid}/stat").read_text("latin-1").rpartition(")")[2].split()
    except OSError:
        return None, None, None
    return fields[0], fields[1], fields[19]


def open_siblings(parent: int | None) -> dict[int, int]:
    """Open a pidfd of each child of process `parent` with RANK in its environment, except for this process.

    Returns {rank: pidfd}. Children that have exited, or that /proc hides, are left out. The result is empty
    if `parent` is None, or if the system has no /proc or no pidfds.
    """
    found: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        is_sibling = pid != os.getpid() and read_stat(pid)[1] == str(parent)
        rank = rank_of(pid) if is_sibling else None
        if rank is not None:
            # Python, the kernel or a sandbox may have no pidfds.
            with contextlib.suppress(OSError, AttributeError):
                found[rank] = os.pidfd_open(pid)
    return found


def rank_of(pid: int) -> int | None:
    """Return RANK from a process's environment; None if RANK is not set or the environment is unreadable."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next((int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")), None)


def wait_readable(fds: Mapping[int, int], timeout_s: float) -> list[int]:
    """Wait until a file descriptor is readable; return the keys of all that are readable.

    `fds` is {key: file descriptor}. A pidfd is readable once its process has exited. The result is empty if
    none is readable after `timeout_s` seconds.
    """
    poller = select.poll()
    keys = {fd: key for key, fd in fds.items()}
    for fd in keys:
        poller.register(fd, select.POLLIN)
    return [keys[fd] for fd, _ in poller.poll(1000 * timeout_s)]


def kill_by_pidfd(pidfd: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):  # it has exited
        signal.pidfd_send_signal(pidfd, number)
