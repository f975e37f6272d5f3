"""Seeded schedules of kills and changing numbers of workers: does each end with the hash of the undisturbed run?

    python benchmarks/schedules.py                    # 60 schedules, half an hour on two cores
    python benchmarks/schedules.py --schedules 5

A schedule has 1 to 5 kills, at start-up, in a forward pass, inside the reduction, in an evaluation or in the middle of a save, and 1 to 4
workers after each. It counts only if every kill hit a living worker. One row a schedule, as JSON; exit code 1 unless all are identical.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from mingpt.verify import prepare_work, problems, schedule


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--first_seed", type=int, default=1)
    arguments = parser.parse_args()
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        config, reference = prepare_work(Path(folder))
        print(json.dumps({"undisturbed": reference.tensors, "workers": 1}), flush=True)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.schedules):
            dice = random.Random(f"schedule {seed}")
            began, start = time.monotonic(), dice.randint(1, 4)
            kills = schedule(seed, dice.randint(1, 5), [1, 2, 3, 4])
            wrong, story = problems(seed, kills, [start], Path(folder), reference, config)
            good += not wrong
            row = {"seed": seed, "workers": start, "kills": [asdict(kill) for kill in kills], "seconds": round(time.monotonic() - began, 1)}
            print(json.dumps(row | {"identical": not wrong, "wrong": wrong, "disturbed": story[-1].split()[-1] if story else None}), flush=True)
    print(json.dumps({"identical": good, "of": arguments.schedules}))
    return 0 if good == arguments.schedules else 1


if __name__ == "__main__":
    sys.exit(main())
