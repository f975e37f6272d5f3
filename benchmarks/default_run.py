"""The run that README.md shows: `python train.py` on two workers, one of them killed at step 170.

    python benchmarks/default_run.py OUT

Copies log.txt, run.json, metrics.jsonl and loss.png to the folder OUT and prints a row as JSON. Exit code 1
unless the run finishes in two generations.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from common import row

from mingpt.tools.jobs import Job, last_step, read_history

KILL_AT_STEP = 170
KEPT = ("log.txt", "run.json", "metrics.jsonl", "loss.png")


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name, "run")
        began = time.monotonic()
        job = Job([sys.executable, "train.py", f"run_dir={run_dir}", "trainer.workers=2"], Path(name, "job"))
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
