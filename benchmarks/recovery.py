"""From SIGKILL to the next completed step, in the default run with two workers.

    python benchmarks/recovery.py                  # 30 kills of a random worker, in as many runs as that takes

A row a kill, as JSON: seconds until a step of the next generation is complete, and the steps that had to be done again. Then the distribution; exit code 1
unless the median is at most 3 s, the 95th percentile at most 4.5 s, and every run ended with the bits of an undisturbed one.
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
            number += 1
            for at in sorted(dice.sample(range(5, STEPS - 10), min(arguments.kills_per_run, arguments.kills - len(took)))):
                job.until(lambda at=at: max(job.steps(), default=0) >= at, 300)  # type: ignore[misc]
                time.sleep(dice.uniform(0, 0.2))  # anywhere in a step
                pids, before = job.workers(), len(job.told()["generations"])
                victim = dice.choice(pids)
                began = time.monotonic()
                os.kill(victim, signal.SIGKILL)
                on = job.until(lambda before=before: resumed(job, before), 60)  # type: ignore[misc]
                took.append(on - began)
                last, now = job.told()["generations"][-2:]
                row(
                    kill=len(took),
                    run=number,
                    victim=pids.index(victim),
                    seconds=round(took[-1], 3),
                    died_at=last["to_step"],
                    resumed_from=now["from_step"],
                )
            codes = job.wait(600)
            same.append(codes == [0] and result(job.run_dir) == expected)
            row(
                run=number,
                codes=codes,
                hash=result(job.run_dir),
                same=same[-1],
                told={key: job.told()[key] for key in ("steps_lost", "seconds_lost", "goodput")},
            )
    median, high = statistics.median(took), quantile(took, 0.95)
    row(
        kills=len(took),
        median_s=round(median, 3),
        p95_s=round(high, 3),
        min_s=round(min(took), 3),
        max_s=round(max(took), 3),
        runs=len(same),
        identical=sum(same),
    )
    return 0 if median <= 3 and high <= 4.5 and all(same) else 1


def resumed(job: Job, before: int) -> bool:
    """Whether a generation after the first `before` has completed a step."""
    generations = job.told()["generations"]
    return len(generations) > before and max(job.steps(), default=0) > generations[-1]["from_step"]


if __name__ == "__main__":
    sys.exit(main())
