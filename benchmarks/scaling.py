"""Tokens per second of 1, 2 and 4 workers of one thread, exact and fast reduction, in turns.

    python benchmarks/scaling.py                   # the default run and 10.65 M parameters, 3 rounds

`efficiency` is tokens/s over the number of workers x the tokens/s of one worker, paired within a round. One
worker exchanges nothing and has no DistributedDataParallel around its model under `exact`; its row under
`fast` shows what that costs. Exit code 1 unless two workers with exact reduction reach 0.95 at 10.65 M
parameters and 0.92 at the default run. More workers than cores only show that nothing breaks.
"""

import argparse
import os
import statistics
import sys

from common import row, spread
from throughput import SIZES, measure

REQUIRED = {"10M": 0.95}  # efficiency of two workers
REQUIRED_OTHERWISE = 0.92

StepTimes = dict[tuple[str, int], list[float]]  # by reduction and number of workers, a value per round


def measure_size(size: str, arguments: argparse.Namespace) -> StepTimes:
    """Median seconds per step; prints a row per round."""
    step_s: StepTimes = {}
    for number in range(arguments.rounds):
        for workers in arguments.workers:
            for reduction in arguments.reductions:
                measured = measure(SIZES[size], workers, [f"trainer.reduction={reduction}"])
                step_s.setdefault((reduction, workers), []).append(statistics.median(measured["steps"]))
        times = {f"{reduction} {workers}": round(of[-1], 4) for (reduction, workers), of in step_s.items()}
        row(size=size, round=number, step_s=times)
    return step_s


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--reductions", nargs="+", default=["exact", "fast"])
    parser.add_argument("--sizes", nargs="+", default=["default", "10M"])
    arguments = parser.parse_args()
    is_good = True
    for size in arguments.sizes:
        step_s = measure_size(size, arguments)
        alone = step_s["exact", 1]
        for (reduction, workers), times in step_s.items():
            paired = [one / (workers * several) for one, several in zip(alone, times, strict=True)]
            median = statistics.median(paired)
            job = {"size": size, "reduction": reduction, "workers": workers, "cores": os.cpu_count()}
            row(**job, efficiency=round(median, 3), **spread(paired, 3))
            if reduction == "exact" and workers == 2:
                is_good = is_good and median >= REQUIRED.get(size, REQUIRED_OTHERWISE)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
