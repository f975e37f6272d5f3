"""A host without Linux's own facilities: do runs, stops, kills, sampling and export work there?

    python benchmarks/bare_host.py                # as root; two minutes on two cores
    python benchmarks/bare_host.py --default      # the default run there, too
    python benchmarks/bare_host.py --suite        # instead: which of pytest's fast tests fail or are skipped?

Each command runs in a mount namespace of its own in which /proc is empty and /dev has six devices, so that
there is no /dev/shm. Functions and constants that a Mac's Python lacks are deleted in each process: pidfds,
sched_getaffinity, memfd_create, posix_fallocate and others (see MISSING). So these commands also show what a
Mac meets, except for its kernel. The watching program itself sees /proc.

Prints a row per trial, as JSON. Exit code 1 unless each job ends with exit code 0 and, after a stop or a
kill, with the hash of the undisturbed run; with --suite, if a test fails.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import SMALL, Tally, argument_parser, row, short_hash, start_plain, work_folder
from support.jobs import Job, last_step, read_history

from mingpt.tools.jobs import ROOT

STEPS, MOMENT = 60, 25
SETTINGS = SMALL | {"trainer.max_steps": STEPS, "trainer.eval_every": 20, "snapshot.every": 10}
NO_MEMORY = "no snapshots in memory: "
MISSING = """
import fcntl, mmap, os, signal, socket
for module, names in (
    (os, "pidfd_open sched_getaffinity sched_setaffinity memfd_create eventfd splice copy_file_range"),
    (os, "posix_fallocate posix_fadvise O_DIRECT"), (signal, "pidfd_send_signal"),
    (socket, "SO_PEERCRED"), (fcntl, "F_SETPIPE_SZ"), (mmap, "MAP_POPULATE"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
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


def bare_host(folder: Path) -> list[str]:
    """The words to put before a command that is to run without the facilities."""
    (folder / "missing").mkdir()
    (folder / "missing" / "sitecustomize.py").write_text(MISSING)
    (folder / "devices").mkdir()
    path = os.pathsep.join([str(folder / "missing"), os.environ.get("PYTHONPATH", "")])
    environment = ["env", f"PYTHONPATH={path}"]
    return [*environment, "unshare", "--mount", "bash", "-c", NAMESPACE, "bash", str(folder / "devices")]


def disturbed(job: Job, run_dir: Path, send: Callable[[Job], None]) -> float:
    """Send a signal at step MOMENT; the seconds until the job's end, or until it is past the step again."""
    job.wait_until(lambda: last_step(run_dir) >= MOMENT, 300)
    began = time.monotonic()
    send(job)
    while job.is_running() and len(read_history(run_dir)["generations"]) < 2:
        time.sleep(0.01)
    while job.is_running() and last_step(run_dir) <= MOMENT:
        time.sleep(0.01)
    return round(time.monotonic() - began, 1)


TRIALS: dict[str, Callable[[Job], None]] = {
    "SIGTERM": lambda job: os.kill(job.pid, signal.SIGTERM),
    "Ctrl-C": lambda job: os.killpg(job.pid, signal.SIGINT),
    "kill": lambda job: os.kill(job.workers()[1], signal.SIGKILL),
}


def try_all(folder: Path, prefix: list[str], tally: Tally, with_default_run: bool) -> None:
    def train(run_dir: Path, settings: dict[str, object]) -> Job:
        return start_plain(run_dir, settings, workers=2, restarts=3, prefix=prefix)

    default: dict[str, dict[str, object]] = {"default run": {}} if with_default_run else {}
    for name, settings in (default | {"undisturbed": SETTINGS}).items():
        run_dir, began = folder / name, time.monotonic()
        job = train(run_dir, settings)
        code, expected = job.wait(3600), short_hash(run_dir)
        lines = [line for line in job.err().splitlines() if line.startswith(NO_MEMORY)]
        row(run=name, code=code, seconds=round(time.monotonic() - began, 1), hash=expected, memory=lines)
        tally.add(code == 0 and len(lines) == 1, job)
    for name, send in TRIALS.items():
        run_dir = folder / name
        job = train(run_dir, SETTINGS)
        took, ends = disturbed(job, run_dir, send), [job]
        job.wait(300)
        if name != "kill":
            ends.append(train(run_dir, SETTINGS))  # the same command again
        codes = [end.wait(300) for end in ends]
        row(run=name, seconds=took, codes=codes, hash=short_hash(run_dir))
        tally.add(not any(codes) and short_hash(run_dir) == expected, job)
    run_dir = folder / "undisturbed"
    commands = {
        "sample": ["sample.py", run_dir, "--tokens", 20],
        "export": ["-m", "mingpt", "export", run_dir],
    }
    for name, words in commands.items():
        more = [folder / "exported"] if name == "export" else []
        job = Job([*prefix, sys.executable, *map(str, [*words, *more])], folder / name)
        row(command=name, code=job.wait(300))
        tally.add(job.process.returncode == 0, job)


def run_suite(prefix: list[str], tally: Tally) -> None:
    """Run the fast tests; print a row for each that fails and for each that is skipped, with its reason."""
    command = [*prefix, sys.executable, "-m", "pytest", "-rfEs", "--tb=line"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    for line in lines:
        if line.startswith(("FAILED", "ERROR", "SKIPPED")):
            row(test=line)
    row(pytest=lines[-1], code=done.returncode)
    tally.add(done.returncode == 0)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--default", action="store_true")
    parser.add_argument("--suite", action="store_true")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        row(skipped="mounting over /proc and /dev needs root")
        return 0
    tally = Tally()
    with work_folder() as folder:
        prefix = bare_host(folder)
        if arguments.suite:
            run_suite(prefix, tally)
        else:
            try_all(folder, prefix, tally, arguments.default)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
