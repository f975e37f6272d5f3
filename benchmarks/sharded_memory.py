"""Peak resident memory of each worker under fsdp, beside what its shards, one unit and activations take.

    python benchmarks/sharded_memory.py [--shapes 12x768,24x1024] [--workers 2,4] [--resume_shapes 12x768]

A few steps with a snapshot in them, on shards of random tokens. From each worker's VmHWM that of a model of
one block of width 64 under the same settings is subtracted. The limit is

    parameters x (16 + 4 x (1 + ceil(log2(rounds))) + 12) bytes / workers
    + 3 x the largest unit in float32 + activations + 200 MB

for weights, gradients and optimizer state, partial sums, and the copy that a snapshot is written from. Then
what a resume takes beyond training's own peak, under every strategy. One row per configuration, as JSON; exit
code 1 unless all are within their limits (256 MB for resuming).
"""

import argparse
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import row, start

from mingpt.tools.jobs import Job, children

WORKERS_RUNS: dict[str, dict[str, Any]] = {
    "fsdp float32": {"trainer.parallel": "fsdp", "trainer.dtype": "float32"},
    "fsdp bfloat16, recompute": {
        "trainer.parallel": "fsdp",
        "trainer.dtype": "bfloat16",
        "trainer.recompute": "block",
    },
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"trainer.parallel": "ddp"},
    "ddp, sharded optimizer": {"trainer.parallel": "ddp", "trainer.shard_optimizer": True},
    "fsdp": {"trainer.parallel": "fsdp"},
}
BLOCK_SIZE, VOCABULARY, MICRO_BATCHES = 128, 512, 8
SETTINGS = {
    "data.block_size": BLOCK_SIZE, "data.vocab_size": VOCABULARY, "trainer.batch_size": MICRO_BATCHES,
    "trainer.micro_batch_size": 1, "trainer.eval_windows": 2, "trainer.sample_tokens": 0,
    "trainer.eval_at_start": False, "trainer.device": "cpu", "trainer.timeout_s": 300,
    "snapshot.every": 2, "snapshot.memory_every": 0, "snapshot.keep_last": 1, "snapshot.keep_best": False,
    "model.arch": "gpt2", "model.dropout": 0.1,
}  # fmt: skip
SLACK_BYTES, RESUME_BYTES = 200e6, 256e6


def peak_bytes(pid: int) -> int:
    """VmHWM of a process; 0 once it has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), default=0)


def peaks(job: Job) -> list[int]:
    """Of each worker of a job, to its end, largest first. Raises RuntimeError if it fails."""
    found: dict[int, int] = {}
    while job.is_running():
        for pid in children(job.pid):
            found[pid] = max(found.get(pid, 0), peak_bytes(pid))
        time.sleep(0.05)
    if job.wait():
        raise RuntimeError(job.err()[-3000:])
    return sorted(found.values(), reverse=True)


def shape_settings(shape: str) -> dict[str, Any]:
    layers, width = map(int, shape.split("x"))
    return {"model.n_layer": layers, "model.n_embd": width, "model.n_head": width // 64}


def parameters(shape: str) -> tuple[int, int]:
    """Of gpt2 of this shape: all, and those of the largest unit, a block or what is in none."""
    layers, width = map(int, shape.split("x"))
    block = 12 * width * width + 13 * width
    rest = (VOCABULARY + BLOCK_SIZE) * width + 2 * width
    return layers * block + rest, max(block, rest)


def activation_bytes(shape: str, recompute: bool, item: int) -> float:
    """Of a micro-batch of one window, generously: what blocks keep for the backward pass, and the logits."""
    layers, width = map(int, shape.split("x"))
    per_block = BLOCK_SIZE * (34 * width) * item + 3 * (width // 64) * BLOCK_SIZE**2 * item
    kept = layers * BLOCK_SIZE * width * 4 + per_block if recompute else layers * per_block
    return kept + 4 * BLOCK_SIZE * VOCABULARY * 4


def run(folder: Path, shape: str, workers: int, more: dict[str, Any], steps: int, name: str) -> list[int]:
    settings = SETTINGS | shape_settings(shape) | more | {"trainer.max_steps": steps}
    settings["data.path"] = str(folder / "tokens")
    return peaks(start(folder / name, settings, workers=workers))


def measure_training(folder: Path, shape: str, workers: int, name: str, more: dict[str, Any]) -> bool:
    """Print a row; returns whether the peak is within its limit."""
    base = run(folder, "1x64", workers, more, 4, f"base-{name}-{shape}-{workers}".replace(" ", ""))
    found = run(folder, shape, workers, more, 4, f"{name}-{shape}-{workers}".replace(" ", ""))
    count, unit = parameters(shape)
    rounds = math.ceil(MICRO_BATCHES / workers)
    state = count * (16 + 4 * (1 + math.ceil(math.log2(rounds))) + 12) / workers
    recompute, item = "recompute" in name, 2 if "bfloat16" in name else 4
    activations = activation_bytes(shape, recompute, item)
    limit = state + 3 * 4 * unit + activations + SLACK_BYTES
    own = found[0] - base[0]
    row(
        strategy=name, shape=shape, workers=workers, parameters=count,
        peak_mb=[round(one / 1e6) for one in found], base_mb=round(base[0] / 1e6),
        own_mb=round(own / 1e6), limit_mb=round(limit / 1e6), shards_mb=round(state / 1e6),
        unit_mb=round(4 * unit / 1e6), activations_mb=round(activations / 1e6), within=own <= limit,
    )  # fmt: skip
    return own <= limit


def measure_resuming(folder: Path, shape: str, workers: int, name: str, more: dict[str, Any]) -> bool:
    """Print a row; returns whether resuming takes little more than training."""
    run_name = f"resume-{name}-{shape}-{workers}".replace(" ", "")
    trained = run(folder, shape, workers, more, 4, run_name)
    resumed = run(folder, shape, workers, more, 8, run_name)
    added = max(one - other for one, other in zip(resumed, trained, strict=True))
    row(
        strategy=name, shape=shape, workers=workers, trained_mb=[round(one / 1e6) for one in trained],
        resumed_mb=[round(one / 1e6) for one in resumed], added_mb=round(added / 1e6),
        within=added <= RESUME_BYTES,
    )  # fmt: skip
    return added <= RESUME_BYTES


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="12x768,24x1024")
    parser.add_argument("--resume_shapes", default="12x768")
    parser.add_argument("--workers", default="2,4")
    arguments = parser.parse_args()
    counts = [int(word) for word in arguments.workers.split(",")]
    good = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").mkdir()
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, 200_000, dtype=np.uint16)
        tokens[:190_000].tofile(folder / "tokens" / "train.bin")
        tokens[190_000:].tofile(folder / "tokens" / "val.bin")
        for shape in arguments.shapes.split(","):
            for workers in counts:
                for strategy, more in WORKERS_RUNS.items():
                    good &= measure_training(folder, shape, workers, strategy, more)
        for shape in filter(None, arguments.resume_shapes.split(",")):
            for strategy, more in STRATEGIES.items():
                good &= measure_resuming(folder, shape, 2, strategy, more)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
