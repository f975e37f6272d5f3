"""Jobs whose snapshots are all corrupt, or cannot be read."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, changed_program, command, final_hash, snapshot_steps

from mingpt.tools.jobs import Job, read_metric


def spoil(run_dir: Path, *steps: int) -> None:
    """Cut the tensor files of these steps, or of all."""
    for path in (run_dir / "snapshots").glob("step_*.safetensors"):
        if not steps or int(path.name[5:13]) in steps:
            path.write_bytes(path.read_bytes()[:-1])


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
    spoil(run_dir)
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


SPOILED_AND_KILLED = """
import os, signal
from pathlib import Path
def on_write_end(kind, step):
    if step == 10:
        for path in Path({snapshots!r}).glob("step_*.safetensors"):
            path.write_bytes(b"")
        os.kill(os.getpid(), signal.SIGKILL)
events.subscribe("write_end", on_write_end)
"""


@pytest.mark.slow
def test_a_restart_without_a_valid_snapshot_left_ends_the_job(
    start: Start, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    program = changed_program(tmp_path, SPOILED_AND_KILLED.format(snapshots=str(run_dir / "snapshots")))
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "snapshot__memory_every": 0}
    settings |= {"trainer__workers": 2, "trainer__max_restarts": 3}
    job = start(command(program=program, **settings))
    assert "no valid snapshot is left" in error_of(job), job.err()
    assert "step 10: its file step_00000010.safetensors has 0 bytes" in job.err()
    assert job.err().count("resumed from") == 0
    assert max(read_metric(run_dir)) < 30


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_a_snapshot_that_cannot_be_read_is_left_alone_and_the_one_before_it_used(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """EIO for each attempt to open the newest manifest; training writes that step again."""
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    place = run_dir / "snapshots"
    job = start(under_strace("EIO", place / "step_00000030.json", text, run_dir))
    assert job.wait() == 0, job.err()
    reason = "its manifest cannot be read: Input/output error"
    assert f"snapshot of step 30 in {place} skipped: {reason}" in job.err()
    assert "resumed from step 25" in job.err()
    assert not list(place.glob("damaged-*"))
    assert final_hash(run_dir) == final_hash(undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace injects the faults")
def test_a_folder_that_cannot_be_read_is_a_sentence_and_no_fresh_start(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    error = error_of(start(under_strace("ESTALE", run_dir / "snapshots", text, run_dir)))
    reason = f"the folder {run_dir}/snapshots cannot be read: Stale file handle"
    assert error.startswith(f"error: the snapshots in {run_dir}/snapshots cannot be read ({reason})")
    assert final_hash(run_dir) == final_hash(undisturbed)


def under_strace(error: str, path: Path, text: Path, run_dir: Path) -> list[str]:
    """A command for a job of one worker, in which opening this file or folder fails."""
    strace = ["strace", "-f", "-qq", "-o", "/dev/null", "-P", str(path), "-e", f"inject=openat:error={error}"]
    return command(launcher=[*strace, sys.executable], run_dir=run_dir, data__path=text, trainer__workers=1)
