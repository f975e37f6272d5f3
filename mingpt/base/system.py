"""Services of the operating system: threads with a time limit, memory, cores and open files.

Work that may hang, on a dead disk for example, runs in a thread, and its caller waits for a limited time.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import TypeVar

from mingpt.base.errors import UserError

try:
    import resource
except ModuleNotFoundError:  # each command imports this file before another module that Windows lacks
    os.write(2, b"error: mingpt-distributed does not run on Windows: use WSL (Windows Subsystem for Linux)\n")
    raise SystemExit(2) from None

T = TypeVar("T")
LOOPBACK = "127.0.0.1"  # unlike localhost, it needs no name resolution
FILES_OF_AGENT, FILES_PER_WORKER = 24, 6  # open files, measured with up to 8 workers, under fsdp, too
# Constants of glibc's malloc.h.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX, M_ARENA_MAX = -1, -2, -4, -8


class OutOfTime(TimeoutError):
    """Work in a thread did not end within its time limit. The thread runs on, and nothing waits for it."""


def check_working_directory() -> None:
    """Raise UserError if `os.getcwd` fails, because torch's MKL library may end this process then."""
    try:
        os.getcwd()
    except OSError as error:
        raise UserError(
            f"the working directory cannot be used ({error.strerror}): change to another"
        ) from None


def run_within(limit_s: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread, and return its result or raise its exception.

    Raises OutOfTime if `work` does not end within `limit_s` seconds.
    """
    outcome = start(work)
    if wait([outcome], limit_s).not_done:
        raise OutOfTime(f"not done within {limit_s:g} s")
    return outcome.result()


def try_within(limit_s: float, work: Callable[[], object]) -> bool:
    """Run `work` in a daemon thread; return whether it ends within `limit_s` seconds.

    If `work` ends with an exception, the thread prints it, and it is not raised here. After the limit the
    thread keeps running, and nothing waits for the thread.
    """
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()


def start(work: Callable[[], T]) -> Future[T]:
    """Start `work` in a daemon thread; return a future of its result or exception."""
    outcome: Future[T] = Future()
    threading.Thread(target=complete, args=(outcome, work), daemon=True).start()
    return outcome


def complete(outcome: Future[T], work: Callable[[], T]) -> None:
    """Run `work` in this thread; set the future `outcome` to its result or exception."""
    try:
        outcome.set_result(work())
    except BaseException as error:
        outcome.set_exception(error)


def use_one_arena() -> None:
    """Make all threads share one malloc arena, with glibc. Call this before a second thread is started."""
    # Otherwise each thread has its own arena, and cannot use memory that another thread has freed.
    set_malloc_option(M_ARENA_MAX, 1)


def keep_freed_memory() -> None:
    """Make glibc keep freed memory, up to 2 GiB at its heap's end: else training steps have page faults."""
    set_malloc_option(M_MMAP_MAX, 0)
    set_malloc_option(M_TRIM_THRESHOLD, 2**31 - 1)
    set_malloc_option(M_TOP_PAD, 64 << 20)


def set_malloc_option(option: int, value: int) -> None:
    """Set a malloc option to `value` with glibc's `mallopt`; do nothing if the C library has no `mallopt`."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(option, value)


def usable_cores() -> int:
    """Return how many whole CPU cores this process may use, by affinity and cgroup (v2) quota; at least 1."""
    try:
        cores = len(os.sched_getaffinity(0))
    except (AttributeError, OSError):  # no Linux, or a sandbox refuses the call
        cores = os.cpu_count() or 1
    quota = cgroup_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return max(1, int(min(cores, quota)))


def allow_open_files(workers: int) -> None:
    """Raise the soft limit on open files, if it is too low for this number of workers on one node.

    Raises UserError if the hard limit is too low: torch would wait for connections that it cannot open.
    """
    least = FILES_OF_AGENT + FILES_PER_WORKER * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        if soft < least:
            resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
    except ValueError:
        raise UserError(
            f"{workers} workers need {least} open files and this process may have {hard} (ulimit -n): raise "
            "that limit, or set trainer.workers=1"
        ) from None


def count_oom_kills(path: Path = Path("/proc/vmstat")) -> int:
    """Return how many processes of this host the kernel has killed for lack of memory since the boot.

    A process also counts if its cgroup, such as a container, had too little memory. Returns 0 if the file
    `path`, the kernel's statistics, has no such number.
    """
    words = path.read_text().split() if path.exists() else []
    return int(words[words.index("oom_kill") + 1]) if "oom_kill" in words else 0


def cgroup_quota(membership: Path, mount: Path) -> float:
    """Return the smallest CPU quota, in cores, of a process's cgroup (v2) and this cgroup's parents.

    The result is inf if none of these has a quota.

    `membership` is the process's /proc/PID/cgroup, `mount` the folder where cgroups are mounted.
    """
    quota = float("inf")
    try:
        (path,) = [line[3:] for line in membership.read_text().splitlines() if line.startswith("0::")]
    except (OSError, ValueError):
        return quota  # no cgroup v2 here
    folder = mount / path.strip("/")
    for place in (folder, *folder.parents):
        try:
            allowed, period = (place / "cpu.max").read_text().split()
            quota = min(quota, int(allowed) / int(period))
        except (OSError, ValueError):
            continue  # this level sets no limit: there is no such file, or it begins with "max"
    return quota
