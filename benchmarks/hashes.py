"""One final hash for any number of workers, in both architectures, both optimizers, float32 and bfloat16.

    python benchmarks/hashes.py

Eight configurations, with dropout 0.1, each with 1, 2, 3, 4, 5 and 8 workers under torchrun; then one with
`trainer.reduction=fast`, whose hash may depend on the number of workers. One row per configuration, as JSON;
exit code 1 unless each of the eight has one hash.
"""

import itertools
import sys
import tempfile
from pathlib import Path

from common import Settings, row, short_hash, train

WORKERS = (1, 2, 3, 4, 5, 8)
SETTINGS = {
    "data.block_size": 32, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32, "model.dropout": 0.1,
    "trainer.batch_size": 16, "trainer.micro_batch_size": 2, "trainer.max_steps": 20,
    "trainer.eval_every": 1000, "trainer.log_every": 20, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "snapshot.every": 1000,
}  # fmt: skip


def final_hashes(folder: Path, settings: Settings) -> dict[int, str]:
    """The hash of the last snapshot for each number of workers."""
    hashes = {}
    for workers in WORKERS:
        run_dir = folder / "-".join([str(workers), *map(str, settings.values())])
        train(run_dir, SETTINGS | dict(settings), workers=workers)
        hashes[workers] = short_hash(run_dir)
    return hashes


def measure(folder: Path, reduction: str, arch: str, optimizer: str, dtype: str) -> int:
    """Print the row of a configuration; returns how many hashes it has."""
    settings = {
        "trainer.reduction": reduction,
        "model.arch": arch,
        "optimizer.name": optimizer,
        "trainer.dtype": dtype,
    }
    hashes = final_hashes(folder, settings)
    row(reduction=reduction, arch=arch, optimizer=optimizer, dtype=dtype, hashes=hashes)
    return len(set(hashes.values()))


def main() -> int:
    configurations = itertools.product(("gpt2", "modern"), ("adamw", "muon"), ("float32", "bfloat16"))
    several = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for arch, optimizer, dtype in configurations:
            several += measure(folder, "exact", arch, optimizer, dtype) > 1
        measure(folder, "fast", "modern", "adamw", "float32")
    row(**{"configurations with several hashes": several})
    return 1 if several else 0


if __name__ == "__main__":
    sys.exit(main())
