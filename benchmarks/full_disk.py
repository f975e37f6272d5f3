"""Disks that are full: does training go on, and does the same command complete it afterwards?

    python benchmarks/full_disk.py                # as root; a quarter of an hour on two cores
    python benchmarks/full_disk.py --stride 20    # every 20th case only: a minute or two

A tmpfs of 4 KiB to 2 MiB holds run_dir, snapshot.path or the cache of a downloaded text. In most cases the
snapshots or the text do not fit. Jobs have one worker, two workers, or two workers of which one is killed.

A job must end with exit code 0 (`first_code`), or with one sentence if the last snapshot does not fit. Then
the tmpfs grows, and the same command must finish the run with the hash and records of an undisturbed run.
Only records that run.json calls missing, and the last one before them, may be missing. Prints a row per
case, as JSON; exit code 1 if a case fails.
"""

import collections
import functools
import http.server
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import SMALL, Tally, argument_parser, row, start, start_plain, work_folder
from support.jobs import Job, last_step, read_history, read_metric, tensor_hash

from mingpt.tools.jobs import ROOT

STEPS, KILL_AT = 30, 12
SETTINGS = SMALL | {
    "data.val_fraction": 0.01, "trainer.max_steps": STEPS, "trainer.eval_every": 10, "snapshot.every": 5,
    "snapshot.keep_last": 100, "snapshot.memory_every": 0,
}  # fmt: skip
SENTENCE = "cannot be written to"  # in the error about the last snapshot
WRITTEN_IN_VAIN = re.compile(r"^(\S+) cannot be written \(", re.MULTILINE)
OWN_TRACEBACK = re.compile(r'^  File ".*/(?:mingpt/\S+|train)\.py"', re.MULTILINE)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs; yield a function that changes its size."""
    folder.mkdir(parents=True)

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    mount(f"size={size}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder's files on this machine; yield the address of the web server."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@dataclass
class Trial:
    """A run: its folder, its settings, the cache for downloads, and the path for the job's output."""

    run_dir: Path
    settings: dict[str, Any]
    cache: Path
    output: Path

    def train(self, workers: int = 1, kills_at: int | None = None) -> Job:
        """Run a job to its end: one worker under plain python, or several under torchrun. Return the Job.

        Sets XDG_CACHE_HOME. If `kills_at` is given, the last worker is killed at this step.
        """
        os.environ["XDG_CACHE_HOME"] = str(self.cache)
        if workers > 1:
            job = start(self.run_dir, self.settings, workers=workers, restarts=2, output=self.output)
        else:
            job = start_plain(self.run_dir, self.settings, workers, output=self.output)
        if kills_at is not None:
            job.wait_until(lambda: last_step(self.run_dir) >= kills_at)
            os.kill(job.workers()[-1], signal.SIGKILL)
        job.wait(300)
        return job

    def weights(self) -> str:
        """Return `tensor_hash` of the snapshot of step STEPS."""
        snapshots = Path(self.settings.get("snapshot.path", self.run_dir / "snapshots"))
        return tensor_hash(snapshots.parent, STEPS)

    def records(self) -> dict[tuple[str, int], float]:
        """Return the losses on record, by name and step."""
        names = ("train/loss", "val/loss")
        return {
            (name, step): loss for name in names for step, loss in read_metric(self.run_dir, name).items()
        }


def has_records(trial: Trial, expected: Trial) -> bool:
    """Return whether `trial` has the records of `expected`, except records that run.json calls missing.

    The evaluation at the step before the first missing step may be missing, too.
    """
    generations = read_history(trial.run_dir)["generations"]
    missing = [entry["metrics_missing"] for entry in generations if "metrics_missing" in entry]
    found, whole = trial.records(), expected.records()
    lost_steps = {step for _, step in whole.keys() - found.keys()}
    is_told = all(any(first - 1 <= step <= last for first, last in missing) for step in lost_steps)
    return found.items() <= whole.items() and is_told


class Disks:
    """Runs the jobs of each case, and judges the results."""

    def __init__(self, work: Path, text_url: str, small_text: Path) -> None:
        self.work, self.text_url, self.small_text = work, text_url, small_text
        self.tally = Tally()
        self.reference = self.undisturbed("undisturbed", small_text)
        self.reference_of_long_text = self.undisturbed("undisturbed-long", ROOT / "data" / "input.txt")

    def trial(self, case: Path, text: Path) -> Trial:
        settings = SETTINGS | {"data.path": text}
        return Trial(case / "run", settings, case / "cache", case / "output")

    def undisturbed(self, name: str, text: Path) -> Trial:
        """Train an undisturbed run on this text. Raises RuntimeError if the run fails."""
        case = self.work / name
        case.mkdir()
        trial = self.trial(case, text)
        job = trial.train()
        if job.process.returncode:
            raise RuntimeError(job.err())
        return trial

    def judge(self, job: Job, trial: Trial, expected: Trial, about: dict[str, Any]) -> None:
        """Start the command of `job` again, compare `trial` with `expected`, and print a row with `about`."""
        first_code, errors = job.process.returncode, job.err()
        said = collections.Counter(Path(path).name for path in WRITTEN_IN_VAIN.findall(errors))
        sentences = [line for line in errors.splitlines() if line.startswith("error: ")]
        last = trial.train(about["workers"])
        problems = {
            "traceback": bool(OWN_TRACEBACK.search(job.err())),  # both starts append to one file
            "first_code": not (first_code == 0 or (len(sentences) == 1 and SENTENCE in sentences[0])),
            "code": last.process.returncode != 0,
            "hash": trial.weights() != expected.weights(),
            "records": not has_records(trial, expected),
            "status": read_history(trial.run_dir)["status"] != "finished",
        }
        found = [name for name, is_so in problems.items() if is_so]
        row(**about, first_code=first_code, said=said, sentence=sentences[:1], problems=found)
        self.tally.add(not found, job)

    def fill(self, where: str, size: str, workers: int, is_killed: bool) -> None:
        """Run a job on a disk of this size, then the same command on a larger disk; judge the results."""
        case = Path(tempfile.mkdtemp(dir=self.work))
        trial, disk, expected = self.trial(case, self.small_text), case / "disk", self.reference
        if where == "run_dir":
            trial.run_dir = disk / "run"
        elif where == "snapshot.path":
            trial.settings["snapshot.path"] = disk / "snapshots"
        else:
            trial.settings["data.path"] = f"{self.text_url}/input.txt"
            trial.cache, expected = disk, self.reference_of_long_text
        with small_disk(disk, size) as resize:
            job = trial.train(workers, KILL_AT if is_killed else None)
            resize("40m")
            about = {"where": where, "size": size, "workers": workers, "killed": is_killed}
            self.judge(job, trial, expected, about)
        shutil.rmtree(case)


def cases() -> Iterator[tuple[str, str, int, bool]]:
    """Yield the cases: (what is on the disk, the disk's size, number of workers, is a worker killed?)."""
    for where in ("run_dir", "snapshot.path", "cache"):
        for size in ("4k", "500k", "1m", "2m"):
            for workers, is_killed in ((1, False), (2, False), (2, True)):
                records_show_steps = where != "run_dir" or size != "4k"
                if records_show_steps or not is_killed:
                    yield where, size, workers, is_killed


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--stride", type=int, default=1)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        row(skipped="mounting a tmpfs needs root")
        return 0
    with work_folder() as work:
        texts = work / "texts"
        texts.mkdir()
        shutil.copy(ROOT / "data" / "input.txt", texts)
        (texts / "small.txt").write_bytes((texts / "input.txt").read_bytes()[:20_000])
        with served(texts) as url:
            disks = Disks(work, url, texts / "small.txt")
            for case in list(cases())[:: arguments.stride]:
                disks.fill(*case)
    return disks.tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
