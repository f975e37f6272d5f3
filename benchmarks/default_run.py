"""The run that README.md shows: `python train.py` on two workers, one of them killed at step 170.

    python benchmarks/default_run.py OUT          # a minute on two cores

Copies log.txt, run.json, metrics.jsonl and loss.png to the folder OUT and prints a row as JSON.
Exit code 1 unless the run finishes in two generations.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path

from common import argument_parser, row, start_plain, work_folder
from support.jobs import last_step, read_history

KILL_AT_STEP = 170
KEPT = ("log.txt", "run.json", "metrics.jsonl", "loss.png")


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with work_folder() as folder:
        run_dir = folder / "run"
        began = time.monotonic()
        job = start_plain(run_dir, {}, workers=2, restarts=3)
        job.wait_until(lambda: last_step(run_dir) >= KILL_AT_STEP, timeout_s=600)
        os.kill(job.workers()[1], signal.SIGKILL)
        code = job.wait(600)
        took = time.monotonic() - began
        history = read_history(run_dir)
        for file in KEPT:
            shutil.copy(run_dir / file, out / file)
        log = (out / "log.txt").read_text().replace(str(run_dir), "RUN_DIR")
        (out / "log.txt").write_text(log)
    row(code=code, seconds=round(took, 1), status=history["status"], generations=len(history["generations"]))
    return 0 if code == 0 and len(history["generations"]) == 2 else 1


if __name__ == "__main__":
    sys.exit(main())
