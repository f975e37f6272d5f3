"""Jobs whose snapshots are all corrupt, or cannot be read."""

import shutil
import sys
from pathlib import Path

import pytest
from conftest import Start, command, final_hash, snapshot_steps

from mingpt.tools.jobs import Job


def error_of(job: Job) -> str:
    """The one line that begins with `error: `, of a job that ends with exit code 2."""
    assert job.wait() == 2, job.err()
    (line,) = [line for line in job.err().splitlines() if line.startswith("error: ")]
    assert "Traceback" not in job.err()
    return line


def test_a_run_without_a_valid_snapshot_left_does_not_start_again_by_itself(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Also where they have been set aside before; snapshot.resume=never begins anew."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    for step in snapshot_steps(run_dir)[1:]:
        for path in (run_dir / "snapshots").glob(f"step_{step:08d}.*"):
            path.unlink()
    for path in (run_dir / "snapshots").glob("step_*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    before = sorted(path.name for path in (run_dir / "snapshots").iterdir())
    words = command(run_dir=run_dir, data__path=text, trainer__workers=1)
    error = error_of(start(words))
    assert error.startswith(f"error: no valid snapshot is left in {run_dir}/snapshots (step ")
    assert "choose another run_dir, or begin anew by snapshot.resume=never" in error
    assert sorted(path.name for path in (run_dir / "snapshots").iterdir()) == before
    for path in (run_dir / "snapshots").iterdir():
        path.rename(path.with_name(f"damaged-1-{path.name}"))
    error = error_of(start(words))
    assert "was set aside; run.json tells of one of step 30, which no node has)" in error
    anew = start([*words, "snapshot.resume=never"])
    assert anew.wait() == 0, anew.err()
    assert final_hash(run_dir) == final_hash(undisturbed)


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_a_snapshot_that_cannot_be_read_is_left_alone_and_the_one_before_it_used(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """EIO for each attempt to open the newest manifest; training writes that step again."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    place = run_dir / "snapshots"
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(place / "step_00000030.json")]
    strace += ["-e", "inject=openat:error=EIO", sys.executable]
    job = start(command(launcher=strace, run_dir=run_dir, data__path=text, trainer__workers=1))
    assert job.wait() == 0, job.err()
    reason = "its manifest cannot be read: Input/output error"
    assert f"snapshot of step 30 in {place} skipped: {reason}" in job.err()
    assert "resumed from step 25" in job.err()
    assert not list(place.glob("damaged-*"))
    assert final_hash(run_dir) == final_hash(undisturbed)
