"""Tell a process from a later one with the same id, and from one on another machine."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pydantic


@dataclass(frozen=True)
class Process:
    """A process on a machine; `start_time` distinguishes it from a later process with the same id."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")
    host: str
    machine: str  # one boot and one pid namespace, within which process ids are valid
    pid: Annotated[int, pydantic.Field(strict=True, gt=0, lt=2**31)]
    start_time: str | None  # in clock ticks since the machine's boot; None if the system does not tell

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; None if it is on another machine, or hidden by /proc."""
        if self.machine != this_machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process of another user
        state, start_time = read_stat(self.pid)
        if state is None and self.start_time is not None:
            return None  # /proc hides it
        return state != "Z" and start_time == self.start_time


def this_process(pid: int | None = None) -> Process:
    """Return the process with this id on this machine, by default the calling one."""
    pid = os.getpid() if pid is None else pid
    return Process(socket.gethostname(), this_machine(), pid, read_stat(pid)[1])


def this_machine() -> str:
    """Return a name that two processes share if and only if they see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()  # no Linux


def read_stat(pid: int) -> tuple[str | None, str | None]:
    """Return the state and the start time of a process from /proc; None for both if it has no entry."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], fields[19]
