"""Prove the promise on this machine: python -m mingpt verify [--kills 10] [--workers 1,2,3,4] [--seed 1]

Trains a small model undisturbed, then again while its workers are killed at seeded moments (start-up,
forward, inside the reduction, evaluation, in the middle of a save) and their number and the strategy
change, all under torchrun. Then compares: the final tensors, bit for bit; the loss curves; and the hashes of
the tokens that the workers were fed with those that configuration and text alone determine. Exit code 0 if
all is identical, 1 with the seed that broke it otherwise. `--break` sabotages the disturbed run on purpose,
to show that verify notices. Ten kills take one to three minutes on two CPU cores.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingpt.base.command import CommandParser, write_lines
from mingpt.config import Config
from mingpt.config.cli import build
from mingpt.report.history import plural
from mingpt.tools.fault_injection import STEPS, Kill, marker
from mingpt.tools.jobs import ROOT, Job, children, is_alive, read_history, tensor_hash, torchrun

if TYPE_CHECKING:
    from mingpt.data import CharDataset

PHASES = ("start-up", "forward", "reduction", "evaluation", "save")
SETTINGS = {
    "data.block_size": 32, "data.val_fraction": 0.1, "model.n_layer": 2, "model.n_head": 2,
    "model.n_embd": 32, "model.dropout": 0.1, "trainer.max_steps": STEPS, "trainer.batch_size": 8,
    "trainer.micro_batch_size": 1,
    "trainer.eval_every": 8, "trainer.log_every": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 60, "snapshot.every": 4, "snapshot.keep_last": 3,
}  # fmt: skip
# Settings that a job may change whenever it starts, besides the number of its workers.
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"trainer.parallel": "ddp", "trainer.shard_optimizer": False},
    "ddp, sharded optimizer": {"trainer.parallel": "ddp", "trainer.shard_optimizer": True},
    "fsdp": {"trainer.parallel": "fsdp"},
}
TIMINGS = ("step_s", "data_s", "tokens_per_s")


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    tensors: str  # SHA-256 of the last snapshot's tensor file
    audit: str
    records: list[dict[str, float]]  # without timings


def make_schedule(seed: int, kills: int, workers: list[int]) -> list[Kill]:
    """Seeded kills in the order of their steps; between two of them a snapshot can be written.

    Any five in a row that begin at a multiple of five have each phase once.
    """
    rng = random.Random(seed)
    steps = sorted(int((number + rng.random()) * (STEPS - 2) / kills) for number in range(kills))
    phases = list[str]()
    while len(phases) < kills:
        phases += rng.sample(PHASES, len(PHASES))
    return [
        Kill(phase, step, rng.randrange(8), rng.choice(workers), rng.choice(list(STRATEGIES)))
        for phase, step in zip(phases, steps, strict=False)
    ]


def train(
    folder: Path, workers: int, kills: list[Kill], settings: dict[str, Any], sabotage: str = ""
) -> None:
    """Train a whole run, killed as planned, at first under ddp.

    torchrun is started again for each change of the number of workers or of the strategy. Raises RuntimeError
    if it fails.
    """
    folder.mkdir(parents=True)
    (folder / "plan.json").write_text(
        json.dumps({"kills": [asdict(kill) for kill in kills], "sabotage": sabotage})
    )
    done, strategy, told = 0, "ddp", 0
    while True:
        own = STRATEGIES[strategy] | {"run_dir": folder / "run"}
        given = [f"{key}={value}" for key, value in (settings | own).items()]
        changes = [
            number
            for number in range(done, len(kills))
            if (kills[number].workers, kills[number].strategy) != (workers, strategy)
        ]
        change = changes[0] if changes else None
        command = [
            *torchrun(workers, len(kills) + 1),
            "-m",
            "mingpt.tools.fault_injection",
            str(folder),
            *given,
        ]
        job = Job(command, folder / "job")
        while job.is_running() and not (change is not None and marker(folder, change).exists()):
            told = tell_kills(folder, kills, told)
            time.sleep(0.02)
        told = tell_kills(folder, kills, told)
        if job.is_running() and change is not None:  # the kill after which another number of workers goes on
            orphans = children(job.pid)
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
            while any(is_alive(pid) for pid in orphans):  # workers notice that their agent is gone
                time.sleep(0.02)
            done, workers, strategy = change + 1, kills[change].workers, kills[change].strategy
        elif job.process.returncode == 0:
            return
        else:
            raise RuntimeError(f"torchrun ended with code {job.process.returncode}:\n{job.err()[-3000:]}")


def tell_kills(folder: Path, kills: list[Kill], told: int) -> int:
    """Write a line on stderr for each kill since the first `told`; returns how many were done by now."""
    while told < len(kills) and marker(folder, told).exists():
        kill, told = kills[told], told + 1
        after = f"{plural(kill.workers, 'worker')}, {kill.strategy}"
        sys.stderr.write(f"kill {told} of {len(kills)}: {kill.phase}, step {kill.step}; then {after}\n")
    return told


def read_outcome(folder: Path, config: Config) -> Outcome:
    run_dir, step = folder / "run", config.trainer.max_steps
    manifest = json.loads((run_dir / "snapshots" / f"step_{step:08d}.json").read_text())
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    records = [
        {key: value for key, value in json.loads(line).items() if key not in TIMINGS} for line in lines
    ]
    return Outcome(tensor_hash(run_dir, step), manifest["audit"], records)


def describe_generations(folder: Path) -> Iterator[str]:
    """A line on each generation that came as far as training."""
    for number, entry in enumerate(read_history(folder / "run")["generations"]):
        steps = f"steps {entry['from_step']} to {entry['to_step']}"
        yield f"  generation {number}: {plural(entry['workers'], 'worker')}, {steps}, {entry['end']}"


def find_problems(
    seed: int,
    kills: list[Kill],
    workers: list[int],
    work: Path,
    reference: Outcome,
    config: Config,
    sabotage: str = "",
) -> tuple[list[str], list[str]]:
    """Train disturbed; returns the problems, if there are any, and lines on what happened."""
    folder = work / f"seed-{seed}"
    try:
        train(folder, workers[0], kills, SETTINGS | {"data.path": config.data.path}, sabotage)
        summary = list(describe_generations(folder))
        if sabotage == "byte":
            path = folder / "run" / "snapshots" / f"step_{STEPS:08d}.safetensors"
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)
        outcome = read_outcome(folder, config)
    except (RuntimeError, OSError) as error:
        return [str(error)], []
    problems = []
    missed = [number for number in range(len(kills)) if not marker(folder, number).exists()]
    if missed:
        problems.append(f"kills {missed} hit no living worker")
    if outcome.tensors != reference.tensors:
        hashes = f"{reference.tensors[:16]} undisturbed, {outcome.tensors[:16]} disturbed"
        problems.append(f"the final tensors differ: {hashes}")
    if outcome.records != reference.records:
        problems.append("the recorded losses differ")
    if outcome.audit != expected_audit(config):
        problems.append("the workers were fed other tokens than configuration and text determine")
    shutil.rmtree(folder)
    return problems, [*summary, f"  disturbed    {outcome.tensors}"]


def expected_audit(config: Config) -> str:
    """The audit chain that configuration and text give; also checks that an epoch reads each window once."""
    from mingpt.data import make_corpus, read_bytes
    from mingpt.training.audit import each_window_once, recompute

    dataset: CharDataset = make_corpus(read_bytes(config.data), config.data).train
    epochs = 1 + STEPS * config.trainer.batch_size * dataset.block_size // len(dataset.tokens)
    if not each_window_once(config, dataset, epochs):
        raise RuntimeError("an epoch does not read every window once")
    return recompute(config, dataset, config.trainer.max_steps)


def train_undisturbed(work: Path) -> tuple[Config, Outcome]:
    """Train with one worker on the first characters of the embedded text, for a few epochs."""
    text = work / "text.txt"
    text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:5000])
    config = build(SETTINGS | {"data.path": str(text)})
    train(work / "undisturbed", 1, [], SETTINGS | {"data.path": str(text)})
    return config, read_outcome(work / "undisturbed", config)


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt verify", __doc__)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument(
        "--workers", default="1,2,3,4", help="numbers of workers, 1 to 8 (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--break", dest="sabotage", choices=["window", "sum", "byte"], default="", help="sabotage on purpose"
    )
    options = parser.parse_args(arguments)
    counts = [int(count) if count.isdecimal() else 0 for count in options.workers.split(",")]
    if options.kills < 1 or not all(1 <= count <= 8 for count in counts):
        parser.error("--kills must be at least 1 and --workers numbers from 1 to 8, such as 1,2,4")
    with tempfile.TemporaryDirectory() as name:
        work, began = Path(name), time.monotonic()
        config, reference = train_undisturbed(work)
        write_lines([f"undisturbed: 1 worker, {STEPS} steps, {time.monotonic() - began:.0f} s"])
        kills = make_schedule(options.seed, options.kills, counts)
        problems, summary = find_problems(
            options.seed, kills, counts, work, reference, config, options.sabotage
        )
    write_lines([*summary, f"  undisturbed  {reference.tensors}"])
    took = f"({time.monotonic() - began:.0f} s)"
    write_lines([f"seed {options.seed} broke it: {'; '.join(problems)}" if problems else f"identical {took}"])
    return 1 if problems else 0
