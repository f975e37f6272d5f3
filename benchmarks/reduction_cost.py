"""What exact reduction costs over DDP's own all-reduce: step times in turns, two workers of one thread each.

    python benchmarks/reduction_cost.py              # the default run and a 10.65 M parameter model

A row per pair, as JSON, then the median of the paired ratios exact / fast with their range.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import median_step_s, row, train

SIZES: dict[str, dict[str, Any]] = {
    "default": {"trainer.max_steps": 40, "trainer.log_every": 10},
    "10.65M": {
        "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384,
        "trainer.batch_size": 16, "trainer.micro_batch_size": 2, "optimizer.name": "adamw",
        "trainer.max_steps": 8, "trainer.log_every": 2,
    },
}  # fmt: skip
ALONE = {
    "trainer.eval_every": 100_000,
    "snapshot.every": 100_000,
    "trainer.sample_tokens": 0,
    "data.val_fraction": 0.01,
}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for size in arguments.sizes:
            ratios = []
            for number in range(arguments.pairs):
                times = {}
                for reduction in ("exact", "fast") if number % 2 else ("fast", "exact"):
                    run_dir = Path(name, f"{size}-{reduction}-{number}")
                    train(run_dir, SIZES[size] | ALONE, f"trainer.reduction={reduction}")
                    times[reduction] = median_step_s(run_dir)
                ratios.append(times["exact"] / times["fast"])
                rounded = {reduction: round(step_s, 4) for reduction, step_s in times.items()}
                row(size=size, pair=number, ratio=round(ratios[-1], 4), **rounded)
            median = round(statistics.median(ratios), 4)
            row(size=size, median=median, min=round(min(ratios), 4), max=round(max(ratios), 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
