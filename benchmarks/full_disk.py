"""Disks that are full or fail: does training go on, and does the same command complete it afterwards?

    python benchmarks/full_disk.py                # as root, with strace; half an hour on two cores
    python benchmarks/full_disk.py --stride 9     # every ninth fault only
    python benchmarks/full_disk.py --only tmpfs   # or eio

- `tmpfs`: a disk of 4 KB and of 0.5, 1 and 2 MB under run_dir, under snapshot.path and under the cache, which
  snapshots and text overflow; one worker of plain python, two of torchrun, and two of which one is killed.
- `eio`: one worker, of a fresh run and of one that was killed before. strace fails the first, the middle, the
  last, or every call of a kind on one file: metrics.jsonl, run.json, log.txt, loss.png, config.yaml, the
  cached text.

A job may say what it cannot write, once per file, and ends with exit code 0; with 1 and one sentence where
the last snapshot does not fit (`first_code`). Then there is room, and the same command must end with exit
code 0, the hash and the records of an undisturbed run, and the status `finished`. No traceback of ours
anywhere. A row per fault, as JSON; exit code 1 unless all is so.
"""

import argparse
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import arguments_of, row, start_plain

from mingpt.tools.jobs import ROOT, Job, last_step, read_history, read_metric, tensor_hash, torchrun

STEPS, KILL_AT = 30, 12
SETTINGS = {
    "data.block_size": 32, "data.val_fraction": 0.01,
    "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32,
    "trainer.batch_size": 8, "trainer.micro_batch_size": 1, "trainer.max_steps": STEPS,
    "trainer.eval_every": 10, "trainer.log_every": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 60, "snapshot.every": 5, "snapshot.keep_last": 100, "snapshot.memory_every": 0,
}  # fmt: skip
CALLS = (
    "openat",
    "read",
    "write",
    "fsync",
    "rename",
    "unlink",
    "ftruncate",
    "truncate",
    "close",
    "newfstatat",
)
FILES = {
    "metrics.jsonl": ["metrics.jsonl", "metrics.jsonl.partial"],
    "run.json": ["run.json", "run.json.partial"],
    "log.txt": ["log.txt"],
    "loss.png": ["loss.png", "loss.partial.png"],
    "config.yaml": ["config.yaml", "config.yaml.partial"],
}
SENTENCE = "cannot be written to"  # of the error about the last snapshot
WRITTEN_IN_VAIN = re.compile(r"^(\S+) cannot be written \(", re.MULTILINE)


@dataclass
class Outcome:
    """What an undisturbed run ends with."""

    tensors: str
    records: tuple[dict[int, float], dict[int, float]]


def read_outcome(run_dir: Path, snapshots: Path | None = None) -> Outcome:
    folder = snapshots.parent if snapshots else run_dir
    tensors = tensor_hash(folder, STEPS)
    return Outcome(tensors, (read_metric(run_dir), read_metric(run_dir, "val/loss")))


def own_tracebacks(text: str) -> int:
    """Lines of tracebacks that name our files, and tracebacks of plain python."""
    return len(re.findall(r'^  File ".*/(?:mingpt/\S+|train)\.py"', text, re.MULTILINE))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """A tmpfs; the function that it gives changes its size."""
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
    """The address of a web server on this machine with the files of a folder."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Faults:
    """Runs the jobs and counts the bad ones."""

    def __init__(self, work: Path, text_url: str, stride: int) -> None:
        self.work, self.text_url, self.stride = work, text_url, stride
        self.small_text = work / "small.txt"
        self.small_text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
        self.settings = SETTINGS | {"data.path": self.small_text}
        self.count = self.bad = 0
        os.environ["XDG_CACHE_HOME"] = str(work / "cache")

    def is_turn(self) -> bool:
        self.count += 1
        return (self.count - 1) % self.stride == 0

    def train(
        self, output: Path, settings: Mapping[str, Any], workers: int, kills_at: int | None = None
    ) -> Job:
        """A job that has ended: one worker of plain python, or several of torchrun.

        With `kills_at`, the last worker is killed once this step is on record.
        """
        launcher = torchrun(workers, restarts=2) if workers > 1 else [sys.executable]
        own = {**settings, "trainer.workers": workers}
        job = Job([*launcher, "train.py", *arguments_of(own)], output)
        if kills_at is not None:
            job.wait_until(lambda: last_step(settings["run_dir"]) >= kills_at)
            os.kill(job.workers()[-1], signal.SIGKILL)
        job.wait(300)
        return job

    def undisturbed(self, name: str, settings: Mapping[str, Any]) -> Outcome:
        run_dir = self.work / name
        job = self.train(run_dir, {**settings, "run_dir": run_dir}, 1)
        if job.process.returncode:
            raise RuntimeError(job.err())
        return read_outcome(run_dir)

    def judge(
        self,
        job: Job,
        again: Callable[[], Job],
        look: Callable[[], Outcome],
        expected: Outcome,
        run_dir: Path,
    ) -> dict[str, Any]:
        """Start the command again and compare."""
        first_code, errors = job.process.returncode, job.err()
        said = WRITTEN_IN_VAIN.findall(errors)
        sentences = [line for line in errors.splitlines() if line.startswith("error: ")]
        last = again()
        outcome = look()
        status = read_history(run_dir)["status"]
        problems = {
            "traceback": own_tracebacks(job.err()) > 0,  # of both starts: they append to one file
            "first_code": not (first_code == 0 or (len(sentences) == 1 and SENTENCE in sentences[0])),
            "code": last.process.returncode != 0,
            "hash": outcome.tensors != expected.tensors,
            "records": outcome.records != expected.records,
            "status": status != "finished",
        }
        found = [name for name, is_so in problems.items() if is_so]
        self.bad += bool(found)
        lines = dict(collections.Counter(Path(path).name for path in said))
        return {"first_code": first_code, "said": lines, "sentence": sentences[:1], "problems": found}

    def on_small_disks(self) -> None:
        """`tmpfs`."""
        reference = self.undisturbed("undisturbed", self.settings)
        long_text = {"data.path": str(ROOT / "data" / "input.txt")}
        reference_of_long_text = self.undisturbed("undisturbed-long", SETTINGS | long_text)
        for where in ("run_dir", "snapshot.path", "cache"):
            for size in ("4k", "500k", "1m", "2m"):
                for workers, is_killed in ((1, False), (2, False), (2, True)):
                    records_show_steps = where != "run_dir" or size != "4k"
                    if (records_show_steps or not is_killed) and self.is_turn():
                        expected = reference_of_long_text if where == "cache" else reference
                        self.on_small_disk(where, size, workers, is_killed, expected)

    def on_small_disk(self, where: str, size: str, workers: int, is_killed: bool, expected: Outcome) -> None:
        case = self.work / f"{where}-{size}-{workers}-{is_killed}"
        run_dir, settings, disk = case / "run", dict(self.settings), case / "disk"
        snapshots = None
        if where == "run_dir":
            run_dir = disk / "run"
        elif where == "snapshot.path":
            snapshots = disk / "snapshots"
            settings["snapshot.path"] = snapshots
        else:
            settings["data.path"] = f"{self.text_url}/input.txt"
            os.environ["XDG_CACHE_HOME"] = str(disk)
        output = case / "output"  # not on the full disk
        with small_disk(disk, size) as resize:

            def train(kills_at: int | None = None) -> Job:
                own = {**settings, "run_dir": run_dir}
                return self.train(output, own, workers, kills_at)

            job = train(KILL_AT if is_killed else None)
            resize("40m")
            look = functools.partial(read_outcome, run_dir, snapshots)
            verdict = self.judge(job, train, look, expected, run_dir)
        os.environ["XDG_CACHE_HOME"] = str(self.work / "cache")
        row(fault="tmpfs", where=where, size=size, workers=workers, killed=is_killed, **verdict)
        shutil.rmtree(case)

    def with_failing_calls(self) -> None:
        """`eio`."""
        settings = self.settings | {"data.path": f"{self.text_url}/small.txt"}
        reference = self.undisturbed("undisturbed-served", settings)
        killed = self.killed_run(settings)
        for kind, origin in (("fresh", None), ("resumed", killed)):
            watched = {name: [f"run/{path}" for path in paths] for name, paths in FILES.items()}
            (cached,) = (self.work / "cache" / "mingpt").glob("*small.txt")
            watched["cache"] = [f"cache/mingpt/{cached.name}"]
            for name, paths in watched.items():
                counts = self.count_calls(origin, settings, paths)
                for call, calls in sorted(counts.items()):
                    for when in dict.fromkeys(["1", str((calls + 1) // 2), str(calls), "1+"]):
                        if self.is_turn():
                            self.with_failing_call(kind, origin, settings, name, paths, call, when, reference)

    def killed_run(self, settings: Mapping[str, Any]) -> Path:
        """A run folder as a killed job leaves it, past its third snapshot."""
        run_dir = self.work / "killed" / "run"
        run_dir.parent.mkdir()
        job = start_plain(run_dir, settings, 1, 0)
        job.wait_until(lambda: last_step(run_dir) >= 17)
        job.kill()
        return run_dir

    def case(self, origin: Path | None) -> Path:
        """A folder for a run that goes on from `origin`, and for a cache."""
        case = Path(tempfile.mkdtemp(dir=self.work))
        if origin:
            shutil.copytree(origin, case / "run")
            shutil.copytree(self.work / "cache", case / "cache")
        return case

    def strace(self, case: Path, settings: Mapping[str, Any], paths: list[str], more: list[str]) -> Job:
        """The job under strace, which watches these files; it has ended."""
        watched = [word for path in paths for word in ("-P", str(case / path))]
        watching = [
            "strace",
            "-f",
            "-qq",
            "-o",
            str(case / "log"),
            *watched,
            "-e",
            f"trace={','.join(CALLS)}",
        ]
        own = {"run_dir": case / "run", "trainer.workers": 1}
        train = [sys.executable, "train.py", *arguments_of({**settings, **own})]
        job = Job([*watching, *more, *train], case / "output", XDG_CACHE_HOME=str(case / "cache"))
        job.wait(300)
        return job

    def count_calls(
        self, origin: Path | None, settings: Mapping[str, Any], paths: list[str]
    ) -> dict[str, int]:
        """{call: how many there are in the thread that has the most}; strace counts them by thread."""
        case = self.case(origin)
        job = self.strace(case, settings, paths, [])
        if job.process.returncode:
            raise RuntimeError(job.err())
        by_thread = collections.Counter(
            re.findall(r"^(\d+) +(\w+)\(", (case / "log").read_text(), re.MULTILINE)
        )
        shutil.rmtree(case)
        counts: dict[str, int] = {}
        for (_, call), count in by_thread.items():
            counts[call] = max(count, counts.get(call, 0))
        return counts

    def with_failing_call(
        self,
        kind: str,
        origin: Path | None,
        settings: Mapping[str, Any],
        name: str,
        paths: list[str],
        call: str,
        when: str,
        expected: Outcome,
    ) -> None:
        case = self.case(origin)
        run_dir = case / "run"
        job = self.strace(case, settings, paths, ["-e", f"inject={call}:error=EIO:when={when}"])
        hits = (case / "log").read_text().count("(INJECTED)")

        def again() -> Job:
            return self.train(case / "output", {**settings, "run_dir": run_dir}, 1)

        verdict = self.judge(job, again, functools.partial(read_outcome, run_dir), expected, run_dir)
        is_repeated = any(count > 1 for count in verdict["said"].values()) and when == "1+"
        self.bad += is_repeated
        row(
            fault="eio", run=kind, file=name, call=call, when=when, hits=hits, repeated=is_repeated, **verdict
        )
        shutil.rmtree(case)


def why_not(only: str | None) -> str | None:
    """Why the faults cannot be made here, if that is so."""
    if only != "eio" and os.geteuid() != 0:
        return "mounting a tmpfs needs root"
    if only != "tmpfs" and shutil.which("strace") is None:
        return "strace is not installed"
    return None


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--only", choices=["tmpfs", "eio"])
    arguments = parser.parse_args()
    reason = why_not(arguments.only)
    if reason:
        row(skipped=reason)
        return 0
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        texts = work / "texts"
        texts.mkdir()
        shutil.copy(ROOT / "data" / "input.txt", texts)
        with served(texts) as url:
            faults = Faults(work, url, arguments.stride)
            shutil.copy(faults.small_text, texts)
            if arguments.only != "eio":
                faults.on_small_disks()
            if arguments.only != "tmpfs":
                faults.with_failing_calls()
    row(faults=-(-faults.count // arguments.stride), bad=faults.bad)
    return 1 if faults.bad else 0


if __name__ == "__main__":
    sys.exit(main())
