"""What exact reduction costs over DDP's own all-reduce: step times in pairs, in turns, two workers of one thread each.

    python benchmarks/reduction_cost.py              # the default run and a 10.65 M parameter model

A row a pair, as JSON, then the median of the paired ratios exact / fast with their range.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
SIZES = {
    "default": ["trainer.max_steps=40", "trainer.log_every=10"],
    "10.65M": ["model.arch=gpt2", "model.n_layer=6", "model.n_head=6", "model.n_embd=384", "trainer.batch_size=16", "trainer.micro_batch_size=2",
               "optimizer.name=adamw", "trainer.max_steps=8", "trainer.log_every=2"],
}  # fmt: skip


def step_s(folder: Path, settings: list[str], reduction: str, number: int) -> float:
    """Median seconds per step over the records after the first."""
    run_dir = folder / f"{reduction}{number}-{len(settings)}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", f"run_dir={run_dir}", *settings]
    command += [
        f"trainer.reduction={reduction}",
        "trainer.eval_every=100000",
        "snapshot.every=100000",
        "trainer.sample_tokens=0",
        "data.val_fraction=0.01",
    ]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=env)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(record["step_s"] for record in records[2:] if "step_s" in record)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for size, settings in SIZES.items():
            ratios = []
            for number in range(arguments.pairs):
                order = ("exact", "fast") if number % 2 else ("fast", "exact")
                times = {reduction: step_s(Path(folder), settings, reduction, number) for reduction in order}
                ratios.append(times["exact"] / times["fast"])
                print(
                    json.dumps(
                        {"size": size, "pair": number, "ratio": round(ratios[-1], 4)} | {key: round(value, 4) for key, value in times.items()}
                    ),
                    flush=True,
                )
            print(
                json.dumps({"size": size, "median": round(statistics.median(ratios), 4), "min": round(min(ratios), 4), "max": round(max(ratios), 4)}),
                flush=True,
            )


if __name__ == "__main__":
    main()
