"""Seeded kills and changing numbers of workers: does each run end with the hash of the undisturbed run?

    python benchmarks/schedules.py                    # 60 schedules, half an hour on two cores
    python benchmarks/schedules.py --schedules 1      # a minute

A schedule has 1 to 5 kills: at start-up, in a forward pass, in the reduction, in an evaluation or a
save. After each kill there are 1 to 4 workers. A kill that hits no living worker is a failure. Prints one
row per schedule, as JSON; exit code 1 unless all runs are identical.
"""

import random
import sys
import time
from pathlib import Path
from typing import Any

from common import Tally, argument_parser, row, work_folder

from mingpt.tools.verify import find_problems, last_manifest, make_schedule, train_undisturbed


def is_identical(seed: int, folder: Path, settings: dict[str, Any]) -> bool:
    """Run the schedule of this seed, print its row, and return whether there was no problem."""
    rng = random.Random(f"schedule {seed}")
    began, workers = time.monotonic(), rng.randint(1, 4)
    kills = make_schedule(seed, rng.randint(1, 5), [1, 2, 3, 4])
    problems, digest = find_problems(seed, kills, workers, folder, settings)
    row(
        seed=seed, workers=workers, kills=kills,
        seconds=round(time.monotonic() - began, 1), identical=not problems, problems=problems,
        disturbed=digest,
    )  # fmt: skip
    return not problems


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--first_seed", type=int, default=1)
    arguments = parser.parse_args()
    tally = Tally()
    with work_folder() as folder:
        settings = train_undisturbed(folder)
        row(undisturbed=last_manifest(folder / "undisturbed").sha256, workers=1)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.schedules):
            tally.add(is_identical(seed, folder, settings))
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
