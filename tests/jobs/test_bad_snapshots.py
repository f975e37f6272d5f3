"""A job whose snapshots are all corrupt; tests/snapshot/ tests snapshots that cannot be read."""

from pathlib import Path

import pytest
from conftest import Finish, Start, assert_same_run, command, error_of, snapshot_steps


@pytest.mark.slow
def test_a_run_without_a_valid_snapshot_left_does_not_start_again_by_itself(
    start: Start, finish: Finish, text: Path, undisturbed: Path, copied: Path
) -> None:
    """This holds also if the snapshots were set aside before; snapshot.resume=never begins anew."""
    snapshots = copied / "snapshots"
    for step in snapshot_steps(copied)[1:]:
        for path in snapshots.glob(f"step_{step:08d}.*"):
            path.unlink()
    for path in snapshots.glob("step_*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(snapshots.iterdir())
    words = command(run_dir=copied, data__path=text, trainer__workers=1)
    error = error_of(start(words))
    assert error.startswith(f"no valid snapshot is left in {snapshots} (step ")
    assert "choose another run_dir, or begin anew by snapshot.resume=never" in error
    assert sorted(snapshots.iterdir()) == before
    for path in before:
        path.rename(path.with_name(f"damaged-1-{path.name}"))
    assert "(run.json tells of one of step 30, which no node has)" in error_of(start(words))
    finish(run_dir=copied, trainer__workers=1, snapshot__resume="never")
    assert_same_run(copied, undisturbed)
