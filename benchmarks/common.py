"""Helpers of the programs that print results as rows of JSON; rows that were kept are in results/."""

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
from support import jobs
from support.jobs import Job, read_metric, tensor_hash

from mingpt.tools.jobs import ROOT, clean_environment, torchrun

Settings = Mapping[str, Any]
Variants = Mapping[str, Callable[..., float]]
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
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {}, "fsdp": {"trainer.parallel": "fsdp"}, "sharded": {"trainer.shard_optimizer": True}
}  # fmt: skip


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=description, formatter_class=formatter)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def row(**values: Any) -> None:
    print(json.dumps(values), flush=True)


class Tally:
    def __init__(self) -> None:
        self.trials = self.good = 0

    def add(self, is_good: bool, *jobs: Job) -> None:
        self.trials += 1
        self.good += is_good
        for job in () if is_good else jobs:
            print(job.err()[-3000:], file=sys.stderr)

    def exit_code(self, **more: Any) -> int:
        row(trials=self.trials, ok=self.good, **more)
        return 0 if self.good == self.trials else 1


def arguments_of(settings: Settings, more: Iterable[str] = ()) -> list[str]:
    given = dict(word.partition("=")[::2] for word in more)
    return [f"{key}={value}" for key, value in {**settings, **given}.items()]


def start(
    run_dir: Path,
    settings: Settings,
    *more: str,
    workers: int = 2,
    restarts: int = 0,
    launch: str = "torchrun",
    checkout: Path = ROOT,
    output: Path | None = None,
    program: str = "train.py",
) -> Job:
    launcher, own = torchrun(workers, restarts), dict[str, Any](run_dir=run_dir)
    if launch == "plain":
        launcher = [sys.executable]
        own |= {"trainer.workers": workers, "trainer.max_restarts": restarts}
    command = [*launcher, program, *arguments_of({**settings, **own}, more)]
    return Job(command, output or run_dir, cwd=checkout)


def changed_program(folder: Path, code: str) -> str:
    here = str(Path(__file__).parent)
    return str(jobs.changed_program(folder, f"sys.path.insert(0, {here!r})\n{code}"))


def train(run_dir: Path, settings: Settings, *more: str, **options: Any) -> None:
    wait_for_success(start(run_dir, settings, *more, **options))


def train_undisturbed(folder: Path, settings: Settings, *more: str) -> str:
    run_dir, began = folder / "undisturbed", time.monotonic()
    train(run_dir, settings, *more)
    row(undisturbed=short_hash(run_dir), seconds=round(time.monotonic() - began, 1))
    return short_hash(run_dir)


def wait_for_success(job: Job, timeout_s: float = 24 * 3600) -> None:
    code = job.wait(timeout_s)
    if code:
        raise RuntimeError(f"the job ended with code {code}:\n{job.err()[-3000:]}")


def exit_code(job: Job, timeout_s: float) -> int | None:
    try:
        return job.wait(timeout_s)
    except TimeoutError:
        return None


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def short_hash(run_dir: Path) -> str:
    return tensor_hash(run_dir)[:16]


def measure_in_turns(
    variants: Variants, rounds: int, digits: int = 5, **about: Any
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in sorted(variants, reverse=number % 2 == 1):
            found[name].append(variants[name]())
        row(**about, round=number, **{name: round(values[-1], digits) for name, values in found.items()})
    return found


def paired(found: Mapping[str, Sequence[float]], over: str, under: str) -> list[float]:
    return [one / other for one, other in zip(found[over], found[under], strict=True)]


def median_and_spread(values: Sequence[float], digits: int = 3, name: str = "ratio") -> dict[str, float]:
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
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=clean_environment())
    return time.monotonic() - began
