"""The spread of the final validation loss over equal runs, numbers of workers, seeds and learning rates.

    python benchmarks/spread.py TEXT                          # 34 short runs, some minutes; Linux
    python benchmarks/spread.py TEXT --runs 2 --steps 5       # a minute or two

Prints a row per run and per group, as JSON. The last row is about the differences between the losses of the
two learning rates, seed by seed. Exit code 1 unless all runs with seed 1 and rate 0.007 have one hash.
"""

import sys
from pathlib import Path
from statistics import fmean, stdev

from common import argument_parser, row, short_hash, work_folder
from one_hash import SETTINGS, train_forked
from support.jobs import read_metric

RECIPE = SETTINGS | {"trainer.batch_size": 8, "trainer.dtype": "float32", "trainer.eval_windows": 200}


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--runs", type=int, default=10, help="equal runs, and seeds")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    recipe = RECIPE | {"data.path": str(given.text.resolve()), "trainer.max_steps": given.steps}
    seeds, losses, hashes = range(1, given.runs + 1), dict[str, list[float]](), set[str]()
    equal = [(1, 1, 0.007)] * given.runs  # workers, seed, learning rate
    groups = {"equal runs": equal, "workers": [(count, 1, 0.007) for count in (1, 2, 3, 4)]}
    groups |= {f"seeds, rate {rate}": [(1, seed, rate) for seed in seeds] for rate in (0.007, 0.01)}
    for group, (workers, seed, rate) in [(name, run) for name, runs in groups.items() for run in runs]:
        with work_folder() as folder:
            chosen = {"seed": seed, "optimizer.learning_rate": rate}
            train_forked(recipe | chosen | {"run_dir": str(folder / "run")}, workers)
            loss, found = read_metric(folder / "run", "val/loss")[given.steps], short_hash(folder / "run")
        row(group=group, workers=workers, **chosen, val_loss=loss, hash=found)
        losses.setdefault(group, []).append(loss)
        hashes |= {found} if (seed, rate) == (1, 0.007) else set()
    *_, one, other = losses.values()
    losses["difference, seed by seed"] = [b - a for a, b in zip(one, other, strict=True)]
    for group, values in losses.items():
        figures = {"mean": fmean(values), "from": min(values), "to": max(values), "deviation": stdev(values)}
        row(group=group, **{name: round(value, 4) for name, value in figures.items()})
    return 1 if len(hashes) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
