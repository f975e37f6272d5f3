"""From the start of the process to the first completed step, beside a bare `import torch`, in turns.

    python benchmarks/start.py

The default run as `python train.py`, without its first evaluation. Exit code 1 unless the median of the paired ratios is at most 2.5.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, row


def main() -> int:
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    ratios = []
    with tempfile.TemporaryDirectory() as name:
        for number in range(10):
            began = time.monotonic()
            subprocess.run([sys.executable, "-c", "import torch"], check=True, env=env)
            bare = time.monotonic() - began
            run_dir = Path(name, str(number))
            settings = ["trainer.eval_at_start=false", "trainer.log_every=1", "trainer.max_steps=3", "trainer.sample_tokens=0", "trainer.device=cpu"]
            began = time.monotonic()
            job = subprocess.Popen(
                [sys.executable, "train.py", f"run_dir={run_dir}", *settings], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            record = run_dir / "metrics.jsonl"
            while not (record.exists() and record.read_text().endswith("\n")):
                time.sleep(0.002)
            first = time.monotonic() - began
            job.wait()
            assert json.loads(record.read_text().splitlines()[0])["step"] == 1
            ratios.append(first / bare)
            row(round=number, import_torch_s=round(bare, 3), first_step_s=round(first, 3), ratio=round(ratios[-1], 3))
    row(ratio=round(statistics.median(ratios), 3), **{"from": round(min(ratios), 3), "to": round(max(ratios), 3)})
    return 0 if statistics.median(ratios) <= 2.5 else 1


if __name__ == "__main__":
    sys.exit(main())
