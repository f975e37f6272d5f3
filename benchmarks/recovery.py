"""From SIGKILL to the next completed step, in the default run with two workers.

    python benchmarks/recovery.py          # 30 kills of a random worker, in as many runs as that takes

A row per kill, as JSON: seconds until a step of the next generation is complete, the step it died at and the
one it went on from. Then the distribution; exit code 1 unless the median is at most 3 s, the 95th percentile
at most 4.5 s, and every run ended with the bits of an undisturbed one.
"""

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import exit_codes, quantile, row, short_hash, signal_one, start, train

from mingpt.jobs import Job, last_step, read_history

SETTINGS = {"trainer.log_every": 1}  # a record for each step, so that a completed step is seen
STEPS = 340
TIMEOUT_S = 600


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kills_per_run", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, took, is_same = random.Random(arguments.seed), list[float](), list[bool]()
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Path(name, "undisturbed")
        train(undisturbed, SETTINGS)
        expected = short_hash(undisturbed)
        row(undisturbed=expected)
        while len(took) < arguments.kills:
            run_dir = Path(name, f"run{len(is_same)}")
            kills = min(arguments.kills_per_run, arguments.kills - len(took))
            job = start(run_dir, SETTINGS, restarts=100)
            for step in sorted(rng.sample(range(5, STEPS - 10), kills)):
                took.append(seconds_to_recover(job, run_dir, step, rng))
            codes = exit_codes([job], TIMEOUT_S)
            is_same.append(codes == [0] and short_hash(run_dir) == expected)
            history = read_history(run_dir)
            lost = {key: history[key] for key in ("steps_lost", "seconds_lost", "goodput")}
            row(run=len(is_same) - 1, codes=codes, hash=short_hash(run_dir), same=is_same[-1], **lost)
    return report(took, is_same)


def seconds_to_recover(job: Job, run_dir: Path, step: int, rng: random.Random) -> float:
    """Kill a worker around this step; returns the seconds until a later generation has completed a step."""
    job.wait_until(lambda: last_step(run_dir) >= step, 300)
    time.sleep(rng.uniform(0, 0.2))  # anywhere in a step
    pids, before = job.workers(), len(read_history(run_dir)["generations"])
    began = time.monotonic()
    victim = signal_one(pids, signal.SIGKILL, rng)
    if victim is None:
        raise RuntimeError(f"no worker was there to be killed around step {step}:\n{job.err()[-3000:]}")

    def goes_on() -> bool:
        generations = read_history(run_dir)["generations"]
        return len(generations) > before and last_step(run_dir) > generations[-1]["from_step"]

    job.wait_until(goes_on, 60)
    took = time.monotonic() - began
    last, now = read_history(run_dir)["generations"][-2:]
    row(victim=victim, seconds=round(took, 3), died_at=last["to_step"], resumed_from=now["from_step"])
    return took


def report(took: list[float], is_same: list[bool]) -> int:
    """Print the distribution; returns the exit code."""
    median, p95 = statistics.median(took), quantile(took, 0.95)
    row(
        kills=len(took),
        median_s=round(median, 3),
        p95_s=round(p95, 3),
        min_s=round(min(took), 3),
        max_s=round(max(took), 3),
        runs=len(is_same),
        identical=sum(is_same),
    )
    return 0 if median <= 3 and p95 <= 4.5 and all(is_same) else 1


if __name__ == "__main__":
    sys.exit(main())
