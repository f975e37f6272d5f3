"""A run_dir has one job at a time."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Start, assert_same_run, command, error_of, reached, snapshot_steps
from support.jobs import read_history

from mingpt.tools.jobs import torchrun
from mingpt.training.claim import read_newest


@pytest.mark.slow
def test_of_two_jobs_started_together_one_trains_and_the_other_says_who(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__workers": 1}
    jobs = [start(command(**settings)) for _ in range(2)]
    codes = [job.wait() for job in jobs]
    assert sorted(codes) == [0, 2]
    trained, refused = jobs[codes.index(0)], jobs[codes.index(2)]
    line = error_of(refused)
    assert f"run_dir {tmp_path} is in use by job" in line and f"process {trained.pid} on host" in line
    assert_same_run(tmp_path, undisturbed)
    assert len(read_history(tmp_path)["generations"]) == 1
    assert "is in use" not in (tmp_path / "log.txt").read_text()
    assert read_newest(tmp_path).is_free


@pytest.mark.slow
def test_a_job_whose_claim_is_removed_ends(start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"data__path": text, "trainer__max_steps": 100_000, "snapshot__keep_last": 2}
    job = start(command(launcher=torchrun(2, restarts=3), run_dir=tmp_path, **settings))
    job.wait_until(reached(tmp_path, 3))
    line = error_of(start(command(trainer__workers=1, run_dir=tmp_path, **settings)))
    assert f"run_dir {tmp_path} is in use by job" in line and f"process {job.pid} on host" in line
    Path(line.rpartition(" ")[2]).unlink()
    assert "no longer belongs to this job" in error_of(job, code=1)  # the exit code is torchrun's
    assert "mingpt/training/trainer.py" not in job.err()  # we print no traceback; torchrun prints its own
    assert len(read_history(tmp_path)["generations"]) == 1
    assert snapshot_steps(tmp_path)


@pytest.mark.slow
def test_a_new_run_dir_goes_on_with_the_run_of_the_snapshots_elsewhere(
    start: Start, text: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"data__path": text, "trainer__workers": 1, "trainer__max_steps": 4}
    settings |= {"snapshot__path": tmp_path / "bucket"}
    assert start(command(run_dir=tmp_path / "first", **settings)).wait() == 0
    settings |= {"trainer__max_steps": 6, "snapshot__resume": "changed"}
    assert start(command(run_dir=tmp_path / "new", **settings)).wait() == 0
    first, new = read_history(tmp_path / "first"), read_history(tmp_path / "new")
    assert new["id"] == first["id"] and new["generations"][0]["from_step"] == 4
