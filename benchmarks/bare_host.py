"""A host without Linux's own facilities: do runs, stops, kills, sampling and export work there?

    python benchmarks/bare_host.py                # as root; two minutes on two cores
    python benchmarks/bare_host.py --default      # the default run there, too
    python benchmarks/bare_host.py --suite        # instead: which of pytest's fast tests fail or are skipped?

In each command's mount namespace /proc is empty and there is no /dev/shm. Functions and constants that a
Mac's Python lacks are deleted (MISSING). Prints a row per trial, as JSON. With --suite, exit code 1 if a test
fails. Otherwise exit code 1 unless each job ends with exit code 0. After a stop or a kill, the run must end
with the hash of the undisturbed run. Undisturbed jobs must log once why there are no snapshots in memory.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import SMALL, Tally, argument_parser, row, short_hash, start_plain, work_folder
from support.jobs import Job, last_step, read_history

from mingpt.tools.jobs import ROOT

MOMENT = 25  # the step of a stop or a kill
SETTINGS = SMALL | {"trainer.max_steps": 60, "trainer.eval_every": 20, "snapshot.every": 10}
MISSING = """
import fcntl, mmap, os, signal, socket
for module, names in (
    (os, "pidfd_open sched_getaffinity sched_setaffinity memfd_create eventfd splice copy_file_range"),
    (os, "posix_fallocate posix_fadvise O_DIRECT"), (signal, "pidfd_send_signal"),
    (socket, "SO_PEERCRED"), (fcntl, "F_SETPIPE_SZ"), (mmap, "MAP_POPULATE"),
):
    for name in names.split():
        vars(module).pop(name, None)
"""
# $1 is a folder for the devices; the command follows.
NAMESPACE = """set -e
mount --make-rprivate /
mount -t tmpfs tmpfs "$1"
for name in null zero full random urandom tty; do touch "$1/$name"; mount --bind "/dev/$name" "$1/$name"; done
mount --move "$1" /dev
mount -t tmpfs -o ro tmpfs /proc
shift
exec "$@"
"""
TRIALS: dict[str, Callable[[Job], None]] = {
    "SIGTERM": lambda job: os.kill(job.pid, signal.SIGTERM),
    "Ctrl-C": lambda job: os.killpg(job.pid, signal.SIGINT),
    "kill": lambda job: os.kill(job.workers()[1], signal.SIGKILL),
}


def bare_host(folder: Path) -> list[str]:
    """Write a sitecustomize.py to `folder`; return words to put before a command that needs a bare host."""
    (folder / "devices").mkdir()
    (folder / "sitecustomize.py").write_text(MISSING)
    unshare = ["unshare", "--mount", "bash", "-c", NAMESPACE, "bash", str(folder / "devices")]
    return ["env", f"PYTHONPATH={folder}", *unshare]


def seconds_to_recover(job: Job, run_dir: Path, send: Callable[[Job], None]) -> float:
    """Send a signal at step MOMENT; return the seconds until the job ends or trains in a new generation."""
    job.wait_until(lambda: last_step(run_dir) >= MOMENT, 300)
    began, at = time.monotonic(), last_step(run_dir) + 1  # this step may be recorded before the signal comes
    send(job)
    while job.is_running() and not (read_history(run_dir)["generations"][1:] and last_step(run_dir) > at):
        time.sleep(0.01)
    return round(time.monotonic() - began, 1)


def try_all(folder: Path, prefix: list[str], tally: Tally, first: dict[str, dict[str, Any]]) -> None:
    for name, settings in (first | {"undisturbed": SETTINGS}).items():
        began, run_dir = time.monotonic(), folder / name
        job = start_plain(run_dir, settings, 2, 3, prefix)
        code, expected = job.wait(3600), short_hash(run_dir)
        lines = [line for line in job.err().splitlines() if line.startswith("no snapshots in memory: ")]
        row(run=name, code=code, seconds=round(time.monotonic() - began, 1), hash=expected, said=lines)
        tally.add(code == 0 and len(lines) == 1, job)
    for name, send in TRIALS.items():
        run_dir = folder / name
        job = start_plain(run_dir, SETTINGS, 2, 3, prefix)
        seconds, codes = seconds_to_recover(job, run_dir, send), [job.wait(300)]
        if name != "kill":
            codes.append(start_plain(run_dir, SETTINGS, 2, 3, prefix).wait(300))  # the same command again
        row(run=name, seconds=seconds, codes=codes, hash=short_hash(run_dir))
        tally.add(not any(codes) and short_hash(run_dir) == expected, job)
    run = str(folder / "undisturbed")
    for words in (["sample.py", run], ["-m", "mingpt", "export", run, str(folder / "exported")]):
        job = Job([*prefix, sys.executable, *words], folder / words[0])
        row(command=words[:-1], code=job.wait(300))
        tally.add(job.process.returncode == 0, job)


def run_suite(prefix: list[str], tally: Tally) -> None:
    """Run the fast tests; print rows with pytest's lines about failed and skipped tests, and its summary."""
    command = [*prefix, sys.executable, "-m", "pytest", "-rfEs", "--tb=line"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if line.startswith(("FAILED", "ERROR", "SKIPPED")) or " passed in " in line:
            row(test=line)
    tally.add(done.returncode == 0)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--suite", action="store_true")
    arguments, tally = parser.parse_args(), Tally()
    first: dict[str, dict[str, Any]] = {"default run": {}} if arguments.default else {}
    with work_folder() as folder:
        prefix = bare_host(folder)
        run_suite(prefix, tally) if arguments.suite else try_all(folder, prefix, tally, first)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
