"""Wall time from the start of the process, imports and all, to a validation loss on tiny Shakespeare; several seeds.

    python benchmarks/time_to_loss.py TEXT                      # small, on two CPU cores: validation loss 1.898 in 10 s, 5 seeds
    python benchmarks/time_to_loss.py TEXT --target 1.6 trainer.max_steps=1500 model.n_layer=6
    python benchmarks/time_to_loss.py TEXT --recipe gpu --target 1.4697     # 10.65 M parameters: 10 s of training

The loss is the one that the run records at its last step, fixed beforehand, over the whole validation split (the text's last tenth), in
windows of block_size. A row a seed, as JSON: the loss, the seconds until its record is in metrics.jsonl, and the seconds of training among
them, without imports, compiling and evaluation. Exit code 1 unless all seeds reach the target within `--within_s`, of training for `gpu`.
That recipe was written down before anybody ran it on a GPU.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, row

RECIPE = {
    "model.arch": "modern", "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 128, "data.block_size": 64, "trainer.batch_size": 12,
    "trainer.micro_batch_size": 12, "trainer.threads": 2, "trainer.max_steps": 380, "optimizer.learning_rate": 0.02, "optimizer.warmup_steps": 10,
    "optimizer.momentum": 0.9, "optimizer.min_lr_fraction": 0.0,
    "trainer.eval_at_start": False, "trainer.eval_every": 10**6, "trainer.sample_tokens": 0, "trainer.log_every": 50, "trainer.device": "cpu",
    "snapshot.every": 10**6, "snapshot.memory_every": 0,
}  # fmt: skip
GPU = RECIPE | {
    "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "model.dropout": 0.25, "data.block_size": 256, "trainer.batch_size": 64,
    "trainer.micro_batch_size": 64, "trainer.threads": 1, "trainer.max_steps": 1500, "trainer.device": "cuda", "trainer.compile": True,
    "optimizer.learning_rate": 0.005, "optimizer.warmup_steps": 50, "optimizer.momentum": 0.95,
}  # fmt: skip


def loss_and_time(text: Path, recipe: dict[str, Any], seed: int, extra: list[str]) -> tuple[float, float, float, int]:
    """Validation loss at the last step, seconds from the start until it was on record, those of training, parameters."""
    with tempfile.TemporaryDirectory() as name:
        run_dir = Path(name, "run")
        given = [f"{key}={value}" for key, value in (recipe | {"data.path": text.resolve(), "seed": seed, "run_dir": run_dir}).items()]
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        began = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, "train.py", *given, *extra], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        record = run_dir / "metrics.jsonl"
        while job.poll() is None and not (record.exists() and "val/loss" in record.read_text()):
            time.sleep(0.005)
        took = time.monotonic() - began
        _, errors = job.communicate()
        if job.returncode:
            raise RuntimeError(errors[-2000:])
        records = [json.loads(line) for line in record.read_text().splitlines()]
        losses = [found["val/loss"] for found in records if "val/loss" in found]
        timed = [(0, 0.0), *((found["step"], found["step_s"]) for found in records if "step_s" in found)]
        training = sum((step - before) * step_s for (before, _), (step, step_s) in itertools.pairwise(timed))
        words = (run_dir / "log.txt").read_text().split(" parameters")[0].split()[-1]
    return losses[-1], took, training, int(words.replace(",", ""))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("text", type=Path)
    parser.add_argument("--recipe", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--target", type=float, default=1.898)
    parser.add_argument("--within_s", type=float, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("settings", nargs="*", help="settings that go over the recipe's")
    arguments = parser.parse_intermixed_args()
    good, losses, times = 0, list[float](), list[float]()
    for seed in range(1, arguments.seeds + 1):
        recipe = GPU if arguments.recipe == "gpu" else RECIPE
        loss, took, training, parameters = loss_and_time(arguments.text, recipe, seed, arguments.settings)
        good += loss <= arguments.target and (training if arguments.recipe == "gpu" else took) <= arguments.within_s
        losses.append(loss)
        times.append(took)
        row(seed=seed, parameters=parameters, val_loss=round(loss, 4), seconds=round(took, 2), training_s=round(training, 2))
    row(target=arguments.target, within_s=arguments.within_s, seeds=arguments.seeds, reached=good, loss_mean=round(statistics.fmean(losses), 4),
        loss_worst=round(max(losses), 4), seconds_median=round(statistics.median(times), 2), seconds_worst=round(max(times), 2))  # fmt: skip
    return 0 if good == arguments.seeds else 1


if __name__ == "__main__":
    sys.exit(main())
