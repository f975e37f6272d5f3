"""Processes by a name that no later process can have, so that a file can say which one it belongs to."""

import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """A process on a machine; `start_time` tells it from a later one with the same id."""

    host: str
    machine: str  # of one boot and one pid namespace, within which process ids mean something
    pid: int
    start_time: str | None  # in clock ticks since the machine's boot; None where the system does not say

    def is_alive(self) -> bool | None:
        """None if this is another machine, from which that cannot be seen."""
        if self.machine != this_machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        state, start_time = read_stat(self.pid)
        if state is None and self.start_time is not None:
            return None  # /proc hides it
        return state != "Z" and start_time == self.start_time

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_process(pid: int | None = None) -> Process:
    """The process with this id on this machine, by default the calling one."""
    pid = os.getpid() if pid is None else pid
    return Process(socket.gethostname(), this_machine(), pid, read_stat(pid)[1])


def parse_process(fields: Any) -> Process | None:
    """The inverse of `to_dict`; None for anything else."""
    if not isinstance(fields, Mapping):
        return None
    kinds: dict[str, Any] = {"host": str, "machine": str, "pid": int, "start_time": (str, type(None))}
    if fields.keys() != kinds.keys() or not all(isinstance(fields[key], kinds[key]) for key in kinds):
        return None
    return Process(**fields) if 0 < fields["pid"] < 2**31 else None


def this_machine() -> str:
    """Two processes see each other's ids if and only if this is the same for both."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()  # no Linux


def read_stat(pid: int) -> tuple[str | None, str | None]:
    """State and start time as /proc has them; None where it does not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], fields[19]
