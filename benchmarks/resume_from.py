"""Does this checkout resume the snapshots of another one to the bits that the other reaches by itself?

    git worktree add /tmp/older COMMIT && python benchmarks/resume_from.py /tmp/older

The other checkout trains to the end, with a snapshot half way: a whole state, a state in parts, one with a
sharded optimizer and one of fsdp. Its last snapshot is removed, and this checkout goes on from the one before
with another number of workers, another strategy or both. Prints a row per case, as JSON; exit code 1 unless
all end with one hash and this checkout began half way. (The hash is of the files, so the other checkout's end
in parts is not compared.)
"""

import shutil
import sys
from pathlib import Path

from common import argument_parser, arguments_of, row, short_hash, train, wait_for_success, work_folder
from one_hash import SETTINGS, STRATEGIES
from support.jobs import Job, read_history

from mingpt.tools.jobs import torchrun

STEPS = 12
MORE = {"trainer.max_steps": STEPS, "snapshot.every": STEPS // 2, "snapshot.keep_last": 10}
# Save in parts of 4 kB, by changing the default of the saver's only argument that has one.
IN_PARTS = """
import sys
sys.path.insert(0, {checkout!r})
from mingpt.snapshot import SnapshotSaver
SnapshotSaver.__init__.__defaults__ = tuple(
    4096 if value == 4 << 30 else value for value in SnapshotSaver.__init__.__defaults__
)
import train
train.main()
"""
# {case: (strategy and workers of the other checkout, strategy and workers of this one)}
CASES = {
    "whole": ("ddp", 1, "ddp", 3),
    "in parts": ("ddp", 2, "fsdp", 2),
    "sharded optimizer": ("ddp, sharded optimizer", 2, "ddp", 1),
    "fsdp": ("fsdp", 3, "ddp, sharded optimizer", 2),
}


def resume(case: str, checkout: Path, folder: Path) -> set[str]:
    """The hashes at the end. Raises RuntimeError if a job fails, or goes on from another step."""
    before, workers_before, after, workers_after = CASES[case]
    theirs, ours = folder / "theirs", folder / "ours"
    folder.mkdir()
    if case == "in parts":
        program = folder / "train_in_parts.py"
        program.write_text(IN_PARTS.format(checkout=str(checkout)))
        given = arguments_of(SETTINGS | MORE | {"run_dir": theirs})
        wait_for_success(
            Job([*torchrun(workers_before), str(program), *given], theirs, cwd=checkout), timeout_s=300
        )
    else:
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
    hashes = [short_hash(ours)] if case == "in parts" else [short_hash(theirs), short_hash(ours)]
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
