"""Helpers for the programs of this folder: arguments, jobs, signals to workers, measurements, exit code.

A program prints its results as rows, one JSON object a line. Rows that were kept are in benchmarks/results/.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# `python benchmarks/x.py` finds only its own folder.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.jobs import Job, read_metric, tensor_hash

from mingpt.tools.jobs import ROOT, clean_environment, torchrun

Settings = Mapping[str, Any]
POLL_S = 0.002
# A run whose steps take a few milliseconds.
SMALL: dict[str, Any] = {
    "data.block_size": 32, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32,
    "trainer.batch_size": 8, "trainer.micro_batch_size": 1, "trainer.log_every": 1,
    "trainer.sample_tokens": 0, "trainer.timeout_s": 60, "trainer.device": "cpu",
}  # fmt: skip
# A run in which only the steps are measured.
STEPS_ALONE: dict[str, Any] = {
    "trainer.eval_at_start": False, "trainer.eval_every": 10**6, "trainer.sample_tokens": 0,
    "data.val_fraction": 0.01, "snapshot.every": 10**6, "snapshot.memory_every": 0,
}  # fmt: skip


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows the program's docstring with its line breaks."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Yield an empty folder that is removed when the block ends."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def row(**values: Any) -> None:
    """Print a row of results as JSON."""
    print(json.dumps(values), flush=True)


class Tally:
    """Counts the trials of a program, and the good trials."""

    def __init__(self) -> None:
        self.trials = self.good = 0

    def add(self, is_good: bool, *jobs: Job) -> None:
        """Count a trial; if the trial is not good, show the end of its jobs' stderr."""
        self.trials += 1
        self.good += is_good
        for job in () if is_good else jobs:
            print(job.err()[-3000:], file=sys.stderr)

    def exit_code(self, **more: Any) -> int:
        """Print a row with the counts and `more`; return 0 if all trials were good, else 1."""
        row(trials=self.trials, ok=self.good, **more)
        return 0 if self.good == self.trials else 1


def arguments_of(settings: Settings, more: Iterable[str] = ()) -> list[str]:
    """Return the settings as words of train.py's command line; words of `more` override them."""
    given = dict(word.partition("=")[::2] for word in more)
    return [f"{key}={value}" for key, value in {**settings, **given}.items()]


def start(
    run_dir: Path,
    settings: Settings,
    *more: str,
    workers: int = 2,
    restarts: int = 0,
    checkout: Path = ROOT,
    output: Path | None = None,
    program: str = "train.py",
) -> Job:
    """Start `program` under torchrun; return a Job, whose `output` is `run_dir` unless given."""
    given = [f"run_dir={run_dir}", *arguments_of(settings, more)]
    return Job([*torchrun(workers, restarts), program, *given], output or run_dir, cwd=checkout)


def start_plain(
    run_dir: Path,
    settings: Settings,
    workers: int,
    restarts: int = 0,
    output: Path | None = None,
    program: str = "train.py",
) -> Job:
    """Start plain `python program`; `output` is as in `start`."""
    own = {"run_dir": run_dir, "trainer.workers": workers, "trainer.max_restarts": restarts}
    command = [sys.executable, program, *arguments_of({**settings, **own})]
    return Job(command, output or run_dir)


def changed_program(folder: Path, code: str) -> str:
    """Write a program: `code`, then train.py. Return its path. `code` may import this folder's modules."""
    path, places = folder / "changed_train.py", [str(ROOT), str(Path(__file__).parent)]
    imports = f"import sys\nsys.path[:0] = {places!r}\nimport train\nfrom mingpt.base import events\n"
    path.write_text(f"{imports}{code}\ntrain.main()\n")
    return str(path)


def train(run_dir: Path, settings: Settings, *more: str, **options: Any) -> None:
    """Start a job as `start` does, and wait for its end. Raises RuntimeError if the job fails."""
    wait_for_success(start(run_dir, settings, *more, **options))


def train_undisturbed(folder: Path, settings: Settings, *more: str, workers: int = 2) -> tuple[str, float]:
    """Train a run that nothing disturbs, print a row, and return the run's `short_hash` and seconds."""
    run_dir, began = folder / "undisturbed", time.monotonic()
    train(run_dir, settings, *more, workers=workers)
    seconds = time.monotonic() - began
    row(undisturbed=short_hash(run_dir), seconds=round(seconds, 1))
    return short_hash(run_dir), seconds


def wait_for_success(job: Job, timeout_s: float = 24 * 3600) -> None:
    """Wait for a job. Raises RuntimeError if the job fails, TimeoutError after `timeout_s`."""
    code = job.wait(timeout_s)
    if code:
        raise RuntimeError(f"the job ended with code {code}:\n{job.err()[-3000:]}")


def seconds_until(command: Sequence[str], run_dir: Path, recorded: str, checkout: Path = ROOT) -> float:
    """Run a command; return the seconds until metrics.jsonl contained `recorded`, or the command ended."""
    record, began = run_dir / "metrics.jsonl", time.monotonic()
    job = Job(command, run_dir, cwd=checkout)
    while job.is_running() and not (record.exists() and recorded in record.read_text()):
        time.sleep(POLL_S)
    took = time.monotonic() - began
    wait_for_success(job)
    return took


def exit_code(job: Job, timeout_s: float) -> int | None:
    """Return the exit code of a job, or None if the job did not end in time and was killed."""
    try:
        return job.wait(timeout_s)
    except TimeoutError:
        return None


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run `count` processes that only compute, until the block ends."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def short_hash(run_dir: Path) -> str:
    """Return the first 16 digits of `tensor_hash` for a run's last snapshot, or "none"."""
    return tensor_hash(run_dir)[:16]


def measure_in_turns(
    variants: Mapping[str, Callable[[], float]], rounds: int, digits: int = 5, **about: Any
) -> dict[str, list[float]]:
    """Call each variant once a round, in alternating order; print a row per round; return {name: values}."""
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in sorted(variants, reverse=number % 2 == 1):
            found[name].append(variants[name]())
        row(**about, round=number, **{name: round(values[-1], digits) for name, values in found.items()})
    return found


def paired(found: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    """Return the values of `over` divided by those of `under`, round by round."""
    return [one / other for one, other in zip(found[over], found[under], strict=True)]


def median_and_spread(values: Sequence[float], digits: int = 3, name: str = "ratio") -> dict[str, float]:
    """Return {name: median, "from": least value, "to": largest value}, rounded."""
    return {
        name: round(statistics.median(values), digits),
        "from": round(min(values), digits),
        "to": round(max(values), digits),
    }


def median_metric(run_dir: Path, name: str = "step_s") -> float | None:
    """Return a metric's median over about the last three quarters of its records; None without records."""
    recorded = list(read_metric(run_dir, name).values())
    return statistics.median(recorded[max(1, len(recorded) // 4) :] or recorded) if recorded else None


def seconds_to_import_torch() -> float:
    """Return the time of a bare `python -c "import torch"`, from its start to its end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=clean_environment())
    return time.monotonic() - began
