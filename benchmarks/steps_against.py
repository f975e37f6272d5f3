"""Seconds per step beside another checkout of this project, an older commit for example, in turns.

    git worktree add /tmp/older COMMIT && python benchmarks/steps_against.py /tmp/older

The default run and nanoGPT's CPU size under torchrun with two workers, without evaluations and snapshots. A
step's time is the median over the records of metrics.jsonl after the first. A row per round, as JSON, then
for each size the median of the paired ratios, our seconds per step over the other checkout's, with their
range.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from common import median_step_s, row, spread, train
from throughput import SIZES

from mingpt.tools.jobs import ROOT

ALONE = {
    "trainer.eval_at_start": False,
    "trainer.eval_every": 10**6,
    "trainer.sample_tokens": 0,
    "trainer.device": "cpu",
    "data.val_fraction": 0.01,
    "snapshot.every": 10**6,
    "snapshot.memory_every": 0,
}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["default", "cpu"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    checkouts = {"ours": ROOT, "theirs": arguments.checkout.resolve()}
    with tempfile.TemporaryDirectory() as name:
        for size in arguments.sizes:
            ratios = []
            for number in range(arguments.rounds):
                times = {}
                for kind in reversed(checkouts) if number % 2 else checkouts:
                    run_dir = Path(name, f"{size}-{kind}-{number}")
                    settings = SIZES[size] | ALONE
                    train(run_dir, settings, workers=arguments.workers, checkout=checkouts[kind])
                    times[kind] = median_step_s(run_dir)
                ratios.append(times["ours"] / times["theirs"])
                ours_s, theirs_s = round(times["ours"], 5), round(times["theirs"], 5)
                ratio = round(ratios[-1], 4)
                row(size=size, round=number, ours_s=ours_s, theirs_s=theirs_s, ratio=ratio)
            row(size=size, ratio=round(statistics.median(ratios), 4), **spread(ratios, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
