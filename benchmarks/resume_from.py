"""Does this checkout, resuming from another checkout's snapshot, reach the other checkout's bits?

    git worktree add /tmp/older COMMIT && python benchmarks/resume_from.py /tmp/older

The other checkout trains to the end, by ddp, by ddp with a sharded optimizer, or by fsdp. It saves a snapshot
half way and at the end; the last snapshot is removed. This checkout goes on from half way, with a different
number of workers, a different strategy or both. Prints a row per case, as JSON. Exit code 1 unless all runs
end with one hash and this checkout began half way.
"""

import shutil
import sys
from pathlib import Path

from common import argument_parser, row, short_hash, train, work_folder
from one_hash import SETTINGS, STRATEGIES
from support.jobs import read_history

STEPS = 12
MORE = {"trainer.max_steps": STEPS, "snapshot.every": STEPS // 2, "snapshot.keep_last": 10}
# {case: (strategy and workers of the other checkout, strategy and workers of this one)}
CASES = {
    "whole": ("ddp", 1, "ddp", 3),
    "whole, to fsdp": ("ddp", 2, "fsdp", 2),
    "sharded optimizer": ("ddp, sharded optimizer", 2, "ddp", 1),
    "fsdp": ("fsdp", 3, "ddp, sharded optimizer", 2),
}


def resume(case: str, checkout: Path, folder: Path) -> set[str]:
    """Run a case; return the final hashes. Raises RuntimeError if a job fails or does not start half way."""
    before, workers_before, after, workers_after = CASES[case]
    theirs, ours = folder / "theirs", folder / "ours"
    folder.mkdir()
    settings = SETTINGS | MORE | STRATEGIES[before]
    train(theirs, settings, workers=workers_before, checkout=checkout)
    shutil.copytree(theirs, ours)
    for path in (ours / "snapshots").glob(f"step_{STEPS:08d}*"):
        path.unlink()
    files = len(list((ours / "snapshots").glob("step_*.safetensors")))
    train(ours, SETTINGS | MORE | STRATEGIES[after], workers=workers_after)
    began = read_history(ours)["generations"][-1]["from_step"]
    if began != STEPS // 2:
        raise RuntimeError(f"{case}: resumed from step {began}, not {STEPS // 2}")
    hashes = [short_hash(theirs), short_hash(ours)]
    row(
        case=case, written_by=f"{before}, {workers_before}", files=files,
        resumed_by=f"{after}, {workers_after}", from_step=began, hashes=hashes,
    )  # fmt: skip
    return set(hashes)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout.resolve()
    with work_folder() as folder:
        hashes = [resume(case, checkout, folder / case.replace(" ", "-")) for case in CASES]
    return 0 if len(set.union(*hashes)) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
