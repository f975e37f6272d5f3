"""From SIGKILL to the next completed step, in the default run with two workers.

    python benchmarks/recovery.py          # 30 kills of a random worker, in as many runs as that takes

    python benchmarks/recovery.py --plain  # workers of `python train.py`, without torchrun

A row per kill, as JSON: seconds until a step of the next generation is complete, that over the seconds of a
bare `import torch` (median of some just before the run, when nothing else runs), the step it died at and the
one it went on from. Then the distribution; exit code 1 unless the median of the ratios is at most 1.25 and
every run ended with the bits of an undisturbed one.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import (
    exit_codes,
    quantile,
    row,
    seconds_to_import_torch,
    short_hash,
    signal_one,
    start,
    start_plain,
    train,
)

from mingpt.tools.jobs import Job, last_step, read_history

SETTINGS = {"trainer.log_every": 1}  # a record for each step, so that a completed step is seen
STEPS = 340
IMPORTS = 5
MAX_RATIO = 1.25
TIMEOUT_S = 600


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kills_per_run", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true")
    arguments = parser.parse_args()
    rng, took, is_same = random.Random(arguments.seed), list[float](), list[bool]()
    ratios = list[float]()
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Path(name, "undisturbed")
        train(undisturbed, SETTINGS)
        expected = short_hash(undisturbed)
        row(undisturbed=expected)
        while len(took) < arguments.kills:
            run_dir = Path(name, f"run{len(is_same)}")
            kills = min(arguments.kills_per_run, arguments.kills - len(took))
            import_s = statistics.median(seconds_to_import_torch() for _ in range(IMPORTS))
            row(run=len(is_same), import_torch_s=round(import_s, 3))
            if arguments.plain:
                job = start_plain(run_dir, SETTINGS, workers=2, restarts=100)
            else:
                job = start(run_dir, SETTINGS, restarts=100)
            for step in sorted(rng.sample(range(5, STEPS - 10), kills)):
                took.append(seconds_to_recover(job, run_dir, step, rng, import_s))
                ratios.append(took[-1] / import_s)
            codes = exit_codes([job], TIMEOUT_S)
            is_same.append(codes == [0] and short_hash(run_dir) == expected)
            history = read_history(run_dir)
            lost = {key: history[key] for key in ("steps_lost", "seconds_lost", "goodput")}
            row(run=len(is_same) - 1, codes=codes, hash=short_hash(run_dir), same=is_same[-1], **lost)
    return report(took, ratios, is_same)


def stamp(run_dir: Path) -> list[tuple[int, int]]:
    """Changes with the files that tell how far a run is; reading them takes time that its workers need."""
    files = [(run_dir / name).stat() for name in ("run.json", "metrics.jsonl")]
    return [(file.st_mtime_ns, file.st_size) for file in files]


def seconds_to_recover(job: Job, run_dir: Path, step: int, rng: random.Random, import_s: float) -> float:
    """Kill a worker around this step; returns the seconds until a later generation has completed a step."""
    job.wait_until(lambda: last_step(run_dir) >= step, 300)
    time.sleep(rng.uniform(0, 0.2))  # anywhere in a step
    pids, before = job.workers(), len(read_history(run_dir)["generations"])
    began = time.monotonic()
    victim = signal_one(pids, signal.SIGKILL, rng)
    if victim is None:
        raise RuntimeError(f"no worker was there to be killed around step {step}:\n{job.err()[-3000:]}")

    seen: list[tuple[int, int]] = []

    def goes_on() -> bool:
        nonlocal seen
        before_reading, seen = seen, stamp(run_dir)
        if seen == before_reading:
            return False
        generations = read_history(run_dir)["generations"]
        return len(generations) > before and last_step(run_dir) > generations[-1]["from_step"]

    job.wait_until(goes_on, 60)
    took = time.monotonic() - began
    last, now = read_history(run_dir)["generations"][-2:]
    times = {"seconds": round(took, 3), "ratio": round(took / import_s, 3)}
    row(victim=victim, **times, died_at=last["to_step"], resumed_from=now["from_step"])
    return took


def report(took: list[float], ratios: list[float], is_same: list[bool]) -> int:
    """Print the distribution; returns the exit code."""
    ratio = statistics.median(ratios)
    row(
        kills=len(took),
        ratio=round(ratio, 3),
        median_s=round(statistics.median(took), 3),
        p95_s=round(quantile(took, 0.95), 3),
        min_s=round(min(took), 3),
        max_s=round(max(took), 3),
        runs=len(is_same),
        identical=sum(is_same),
    )
    return 0 if ratio <= MAX_RATIO and all(is_same) else 1


if __name__ == "__main__":
    sys.exit(main())
