"""What exact reduction costs over DDP's own, or FSDP2's: step times in turns, two workers of one thread each.

    python benchmarks/reduction_cost.py              # the default run and a 10.65 M parameter model
    python benchmarks/reduction_cost.py --parallel fsdp --sizes 10.65M 12x768

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
    "12x768": {
        "model.arch": "gpt2", "model.n_layer": 12, "model.n_head": 12, "model.n_embd": 768,
        "trainer.batch_size": 16, "trainer.micro_batch_size": 2, "optimizer.name": "adamw",
        "trainer.max_steps": 4, "trainer.log_every": 1,
    },
}  # fmt: skip
ALONE = {
    "trainer.eval_every": 100_000,
    "snapshot.every": 100_000,
    "snapshot.memory_every": 0,
    "trainer.eval_at_start": False,
    "trainer.eval_windows": 2,
    "trainer.timeout_s": 300,
    "trainer.sample_tokens": 0,
    "data.val_fraction": 0.01,
}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "10.65M"])
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for size in arguments.sizes:
            ratios = []
            for number in range(arguments.pairs):
                times = {}
                for reduction in ("exact", "fast") if number % 2 else ("fast", "exact"):
                    run_dir = Path(name, f"{size}-{reduction}-{number}")
                    settings = SIZES[size] | ALONE | {"trainer.parallel": arguments.parallel}
                    train(run_dir, settings, f"trainer.reduction={reduction}")
                    times[reduction] = median_step_s(run_dir)
                ratios.append(times["exact"] / times["fast"])
                rounded = {reduction: round(step_s, 4) for reduction, step_s in times.items()}
                row(
                    parallel=arguments.parallel, size=size, pair=number, ratio=round(ratios[-1], 4), **rounded
                )
            median = round(statistics.median(ratios), 4)
            span = {"min": round(min(ratios), 4), "max": round(max(ratios), 4)}
            row(parallel=arguments.parallel, size=size, median=median, **span)
    return 0


if __name__ == "__main__":
    sys.exit(main())
