"""Tokens per second of 1, 2 and 4 workers of one thread, exact and fast reduction, in turns.

    python benchmarks/scaling.py                   # the default run and 10.65 M parameters, 3 rounds

`efficiency` is tokens/s over the number of workers x the tokens/s of one worker, paired within a round. One worker exchanges nothing and has no
DistributedDataParallel around its model under `exact`; its row under `fast` shows what that costs. Exit code 1 unless two workers with exact
reduction reach 0.95 at 10.65 M parameters and 0.90 at the default run. More workers than cores only show that nothing breaks.
"""

import argparse
import os
import statistics
import sys
from typing import Any

from common import row
from throughput import SIZES, measure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--reductions", nargs="+", default=["exact", "fast"])
    parser.add_argument("--sizes", nargs="+", default=["default", "10M"])
    arguments = parser.parse_args()
    good = True
    for size in arguments.sizes:
        step_s: dict[tuple[str, int], list[float]] = {}
        for number in range(arguments.rounds):
            for workers in arguments.workers:
                for reduction in arguments.reductions:
                    kept: dict[str, Any] = measure(SIZES[size], workers, [f"trainer.reduction={reduction}"])
                    step_s.setdefault((reduction, workers), []).append(statistics.median(kept["steps"]))
            row(size=size, round=number, step_s={f"{reduction} {workers}": round(times[-1], 4) for (reduction, workers), times in step_s.items()})
        for reduction, workers in step_s:
            paired = [one / (workers * several) for one, several in zip(step_s["exact", 1], step_s[reduction, workers], strict=True)]
            middle = statistics.median(paired)
            spread = {"efficiency": round(middle, 3), "from": round(min(paired), 3), "to": round(max(paired), 3)}
            row(size=size, reduction=reduction, workers=workers, cores=os.cpu_count(), **spread)
            if reduction == "exact" and workers == 2:
                good &= middle >= (0.95 if size == "10M" else 0.90)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
