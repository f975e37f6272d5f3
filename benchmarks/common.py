"""What the programs of this folder share: train.py under torchrun, signals to its workers, rows of JSON."""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # `python benchmarks/x.py` finds only its own folder
from mingpt.tools.jobs import ROOT, Job, clean_environment, free_port, read_metric, tensor_hash, torchrun

Settings = Mapping[str, Any]


def arguments_of(settings: Settings) -> list[str]:
    """The settings as train.py takes them on its command line."""
    return [f"{key}={value}" for key, value in settings.items()]


def start(
    run_dir: Path,
    settings: Settings,
    *more: str,
    workers: int = 2,
    restarts: int = 0,
    checkout: Path = ROOT,
) -> Job:
    """train.py under torchrun on this machine; its output goes to <run_dir>.out and <run_dir>.err."""
    given = [f"run_dir={run_dir}", *arguments_of(settings), *more]
    return Job([*torchrun(workers, restarts), "train.py", *given], run_dir, cwd=checkout)


def start_plain(run_dir: Path, settings: Settings, workers: int, restarts: int) -> Job:
    """Plain `python train.py`, which starts its workers itself; output as in `start`."""
    own = {"run_dir": run_dir, "trainer.workers": workers, "trainer.max_restarts": restarts}
    return Job([sys.executable, "train.py", *arguments_of({**settings, **own})], run_dir)


def start_agents(run_dir: Path, settings: Settings, agents: int, workers: int, restarts: int) -> list[Job]:
    """train.py under several torchrun agents, as on several nodes; each agent starts `workers` workers."""
    rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=job"]
    command = torchrun(workers, restarts, [f"--nnodes={agents}", *rendezvous])
    given = [f"run_dir={run_dir}", *arguments_of(settings)]
    return [Job([*command, "train.py", *given], Path(f"{run_dir}.{agent}")) for agent in range(agents)]


def train(run_dir: Path, settings: Settings, *more: str, workers: int = 2, checkout: Path = ROOT) -> None:
    """As `start`, to the end. Raises RuntimeError if the job fails."""
    job = start(run_dir, settings, *more, workers=workers, checkout=checkout)
    wait_for_success(job)


def wait_for_success(job: Job, timeout_s: float = 24 * 3600) -> None:
    """Raises RuntimeError with what the job wrote to stderr unless it ends with exit code 0."""
    code = job.wait(timeout_s)
    if code:
        raise RuntimeError(f"the job ended with code {code}:\n{job.err()[-3000:]}")


def exit_codes(jobs: Sequence[Job], timeout_s: float) -> list[int | None]:
    """Of each job; None for one that did not end in time and was killed."""
    deadline = time.monotonic() + timeout_s
    codes: list[int | None] = []
    for job in jobs:
        try:
            codes.append(job.wait(max(0.1, deadline - time.monotonic())))
        except TimeoutError:
            codes.append(None)
    return codes


def signal_one(pids: Sequence[int], number: signal.Signals, rng: random.Random) -> int | None:
    """Send a signal to a random process; returns its place in `pids`, None if there is none or it ended."""
    if not pids:
        return None
    place = rng.randrange(len(pids))
    try:
        os.kill(pids[place], number)
    except ProcessLookupError:
        return None
    return place


def seconds_to_import_torch() -> float:
    """Of a bare `python -c "import torch"`, from its start to its end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=clean_environment())
    return time.monotonic() - began


def short_hash(run_dir: Path) -> str:
    """Of the tensors of a run's last snapshot: the first 16 digits of their SHA-256, or "none"."""
    return tensor_hash(run_dir)[:16]


def median_step_s(run_dir: Path) -> float:
    """Median seconds per step over the records of a run after its first."""
    recorded = list(read_metric(run_dir, "step_s").values())
    return statistics.median(recorded[1:])


def row(**values: Any) -> None:
    """Print a row of results as JSON."""
    print(json.dumps(values), flush=True)


def make_manifest(step: int, windows: int, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a manifest that a save knows, of a run with this configuration."""
    return {
        "step": step,
        "windows": windows,
        "config": dict(config),
        "vocabulary": "abc",
        "data": {"path": "data/input.txt", "sha256": "0" * 64},
        "software": {"torch": "2.13.0", "device": "cpu AVX512", "threads": 1, "dtype": "float32"},
        "audit": "0" * 64,
        "metrics": {},
    }


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """The least and the largest value, as a row of results shows them."""
    return {"from": round(min(values), digits), "to": round(max(values), digits)}


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    rank = -(-int(share * 1000 * len(ordered)) // 1000)  # rounded up
    return ordered[min(len(ordered), max(1, rank)) - 1]
