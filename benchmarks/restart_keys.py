"""How often a killed worker's job comes back with stock torchrun, with keys of the generation and without.

    python benchmarks/restart_keys.py

The tutorial's step 4, as it is and with a plain `init_process_group()`, in turns. A job has come back if it
ends with exit code 0 within the limit. A row per job, as JSON, then the number of jobs that came back.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from common import row

from mingpt.tools.jobs import ROOT, Job, torchrun

OWN = "dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)"
STOCK = "dist.init_process_group(timeout=timeout)"


def run_once(folder: Path, has_own_keys: bool, limit_s: float) -> dict[str, object]:
    """Whether the job came back, and after how many seconds it had ended."""
    for name in ("mingpt", "data"):
        os.symlink(ROOT / name, folder / name)
    program = (ROOT / "tutorial" / "4_restarts.py").read_text()
    assert program.count(OWN) == 1
    (folder / "program.py").write_text(program if has_own_keys else program.replace(OWN, STOCK))
    began = time.monotonic()
    job = Job([*torchrun(2, restarts=2), "-m", "program"], folder / "job", cwd=folder)
    try:
        has_ended = job.wait(limit_s) == 0
    except TimeoutError:
        has_ended = False
    return {"came_back": has_ended, "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--limit_s", type=float, default=60.0, help="seconds after which a job is given up")
    arguments = parser.parse_args()
    came_back = {"own": 0, "stock": 0}
    for number in range(arguments.rounds):
        for keys in came_back:
            with tempfile.TemporaryDirectory() as folder:
                result = run_once(Path(folder), keys == "own", arguments.limit_s)
            came_back[keys] += bool(result["came_back"])
            row(round=number, keys=keys, **result)
    row(torch=torch.__version__, rounds=arguments.rounds, came_back=came_back)
    return 0 if came_back["own"] == arguments.rounds else 1


if __name__ == "__main__":
    sys.exit(main())
