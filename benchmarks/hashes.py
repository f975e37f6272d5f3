"""One final hash for any number of workers: both architectures, both optimizers, float32 and bfloat16, dropout 0.1.

    python benchmarks/hashes.py                     # 8 configurations x 6 numbers of workers, under torchrun; and how many hashes `fast` gives

One row a configuration, as JSON; exit code 1 unless each has one hash.
"""

import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORKERS = (1, 2, 3, 4, 5, 8)
SETTINGS = [
    "data.block_size=32", "model.n_layer=2", "model.n_head=2", "model.n_embd=32", "model.dropout=0.1", "trainer.batch_size=16",
    "trainer.micro_batch_size=2", "trainer.max_steps=20", "trainer.eval_every=1000", "trainer.log_every=20", "trainer.sample_tokens=0",
    "trainer.device=cpu", "snapshot.every=1000",
]  # fmt: skip


def final_hash(folder: Path, workers: int, settings: list[str]) -> str:
    run_dir = folder / "-".join([str(workers), *settings])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={workers}", "train.py", f"run_dir={run_dir}"]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    subprocess.run([*command, *SETTINGS, *settings], cwd=ROOT, check=True, capture_output=True, env=env)
    return hashlib.sha256((run_dir / "snapshots" / "step_00000020.safetensors").read_bytes()).hexdigest()[:16]


def main() -> int:
    several = 0
    with tempfile.TemporaryDirectory() as folder:
        for arch, name, dtype in itertools.product(("gpt2", "modern"), ("adamw", "muon"), ("float32", "bfloat16")):
            settings = [f"model.arch={arch}", f"optimizer.name={name}", f"trainer.dtype={dtype}"]
            hashes = {workers: final_hash(Path(folder), workers, settings) for workers in WORKERS}
            several += len(set(hashes.values())) > 1
            print(json.dumps({"reduction": "exact", "arch": arch, "optimizer": name, "dtype": dtype, "hashes": hashes}), flush=True)
        settings = ["model.arch=modern", "optimizer.name=adamw", "trainer.dtype=float32", "trainer.reduction=fast"]
        hashes = {workers: final_hash(Path(folder), workers, settings) for workers in WORKERS}
        print(json.dumps({"reduction": "fast", "arch": "modern", "optimizer": "adamw", "dtype": "float32", "hashes": hashes}), flush=True)
    print(json.dumps({"configurations with several hashes": several}))
    return 1 if several else 0


if __name__ == "__main__":
    sys.exit(main())
