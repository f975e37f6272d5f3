"""The memory that `python -m mingpt plan` says a worker needs, beside its measured peak.

    python benchmarks/plan_memory.py [--shapes 6x384,8x512] [--workers 2] [--more KEY=VALUE ...]

A few steps with an evaluation and a snapshot in them, under each strategy; the peak is the largest VmHWM of a
worker, read from /proc until it ends. A row of JSON for each; exit code 1 unless all are within 10 %.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from common import arguments_of, row, start
from sharded_memory import STRATEGIES, peaks, shape_settings

from mingpt.config.cli import parse
from mingpt.tools.plan import Workload, estimate, measure_data

TOLERANCE = 0.1
SETTINGS = {
    "model.arch": "gpt2", "optimizer.name": "adamw", "data.block_size": 256, "trainer.batch_size": 16,
    "trainer.micro_batch_size": 2, "trainer.dtype": "float32", "trainer.max_steps": 4,
    "trainer.eval_windows": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu", "trainer.timeout_s": 300,
    "snapshot.every": 2, "snapshot.memory_every": 0, "snapshot.keep_last": 1, "snapshot.keep_best": False,
}  # fmt: skip


def compare(folder: Path, shape: str, strategy: str, workers: int, more: list[str]) -> bool:
    """Train, print a row, and return whether the plan is within the tolerance."""
    settings = SETTINGS | shape_settings(shape) | STRATEGIES[strategy]
    config = parse([*arguments_of(settings), *more])
    vocab_size, _ = measure_data(config)
    dtype = config.trainer.dtype
    memory = estimate(Workload(config, vocab_size, workers, on_cpu=True, dtype=dtype))
    measured = max(
        peaks(start(folder / f"{shape}-{strategy.replace(' ', '')}", settings, *more, workers=workers))
    )
    error = memory.peak_bytes / measured - 1
    row(
        shape=shape, strategy=strategy, workers=workers, more=more,
        planned_mb=round(memory.peak_bytes / 1e6), measured_mb=round(measured / 1e6),
        error_percent=round(100 * error, 1), at=memory.largest_phase,
        terms_mb={name: round(size / 1e6) for name, size in memory.terms().items()},
        within=abs(error) <= TOLERANCE,
    )  # fmt: skip
    return abs(error) <= TOLERANCE


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="6x384,8x512,10x640,12x768")
    parser.add_argument("--strategies", default=",".join(name.replace(", ", "+") for name in STRATEGIES))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--more", nargs="*", default=[], metavar="section.key=value")
    arguments = parser.parse_args()
    good = True
    for shape in arguments.shapes.split(","):
        for name in arguments.strategies.split(","):
            with tempfile.TemporaryDirectory() as folder:
                strategy = name.replace("+", ", ")
                good &= compare(Path(folder), shape, strategy, arguments.workers, arguments.more)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
