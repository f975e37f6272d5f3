"""From SIGKILL to the next completed step, in the default run with two workers.

    python benchmarks/recovery.py                  # 30 kills of a random worker, in as many runs as that takes

A row a kill, as JSON: seconds until a step of the next generation is complete, the step it died at and the one it went on from. Then the
distribution; exit code 1 unless the median is at most 3 s, the 95th percentile at most 4.5 s, and every run ended with the bits of an
undisturbed one.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import Job, quantile, result, row

SETTINGS = ["trainer.log_every=1"]  # no more than a record a step, so that a completed step is seen
STEPS = 340


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--kills_per_run", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, took, same, number = random.Random(arguments.seed), list[float](), list[bool](), 0
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Job(Path(name, "undisturbed"), *SETTINGS)
        undisturbed.wait(600)
        expected = result(undisturbed.run_dir)
        row(undisturbed=expected)
        while len(took) < arguments.kills:
            job = Job(Path(name, f"run{number}"), *SETTINGS, restarts=100)
            for at in sorted(dice.sample(range(5, STEPS - 10), min(arguments.kills_per_run, arguments.kills - len(took)))):
                took.append(kill(job, at, dice))
            codes = job.wait(600)
            same.append(codes == [0] and result(job.run_dir) == expected)
            ledger = {key: job.told()[key] for key in ("steps_lost", "seconds_lost", "goodput")}
            row(run=number, codes=codes, hash=result(job.run_dir), same=same[-1], ledger=ledger)
            number += 1
    median, high = statistics.median(took), quantile(took, 0.95)
    spread = {"median_s": round(median, 3), "p95_s": round(high, 3), "min_s": round(min(took), 3), "max_s": round(max(took), 3)}
    row(kills=len(took), **spread, runs=len(same), identical=sum(same))
    return 0 if median <= 3 and high <= 4.5 and all(same) else 1


def kill(job: Job, at: int, dice: random.Random) -> float:
    """Kill a worker around this step; returns the seconds until a generation after it has completed a step."""
    job.until(lambda: max(job.steps(), default=0) >= at, 300)
    time.sleep(dice.uniform(0, 0.2))  # anywhere in a step
    pids, before = job.workers(), len(job.told()["generations"])
    victim = dice.choice(pids)
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)

    def on() -> bool:
        generations = job.told()["generations"]
        return len(generations) > before and max(job.steps(), default=0) > generations[-1]["from_step"]

    took = job.until(on, 60) - began
    last, now = job.told()["generations"][-2:]
    row(victim=pids.index(victim), seconds=round(took, 3), died_at=last["to_step"], resumed_from=now["from_step"])
    return took


if __name__ == "__main__":
    sys.exit(main())
