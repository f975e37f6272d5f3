"""A job that is started again, from snapshots or from another run's weights, or beside another job."""

from pathlib import Path
from typing import Any

import pytest
from support.jobs import (
    Begin,
    Finish,
    assert_same_run,
    contents,
    error_of,
    generations,
    reached,
    read_history,
    read_metric,
    snapshot_steps,
    torchrun,
)
from support.web import object_store


def test_a_finished_run_says_so_and_trains_on_only_if_a_longer_one_is_asked_for(
    finish: Finish, undisturbed: Path, copied: Path
) -> None:
    before = contents(copied)
    evaluation = finish(trainer__workers=1, trainer__eval_only=True)
    assert contents(copied) == before
    assert f"val/loss {read_metric(undisturbed, 'val/loss')[30]:.4f}" in evaluation.err()
    job, weights = finish(trainer__workers=1), read_history(copied)["weights_sha256"]
    assert "already stands at step 30" in job.err() and f"weights at step 30: {weights}" in job.err()
    assert_same_run(copied, undisturbed)
    finish(trainer__workers=1, trainer__max_steps=32, snapshot__resume="changed")
    changes = read_history(copied)["changes"]
    assert changes == [{"step": 30, "settings": ["trainer.max_steps: 30 -> 32"]}]
    assert max(read_metric(copied)) == 32


def test_a_run_begins_with_the_weights_of_another(
    finish: Finish, text: Path, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The other text lacks a character, but keeps all rows: the first loss is far below a fresh model's."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("F", "f"))
    settings: dict[str, Any] = {"data__path": other, "trainer__max_steps": 0, "trainer__workers": 1}
    finish(snapshot__init_from=undisturbed, **settings)
    assert read_metric(run_dir, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]


@pytest.mark.weekly
def test_a_run_whose_snapshots_live_in_an_object_store_resumes(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with object_store(monkeypatch) as bucket:
        bucket.mkdir("runs")
        given = {"launcher": torchrun(2), "snapshot__path": "s3://runs/one"}
        job = begin(**given)
        job.wait_until(lambda: bucket.exists("runs/one/step_00000010.json"))
        job.kill()
        assert "resumed from step" in finish(**given).err()
        content = bucket.cat_file("runs/one/step_00000030.safetensors")
        expected = (undisturbed / "snapshots" / "step_00000030.safetensors").read_bytes()
        assert content == expected and not list(run_dir.glob("snapshots/*"))


@pytest.mark.slow
def test_a_second_job_is_told_of_the_first_which_ends_when_its_claim_is_removed(
    begin: Begin, run_dir: Path
) -> None:
    given = {"trainer__max_steps": 100_000, "snapshot__keep_last": 2}
    job = begin(launcher=torchrun(2, restarts=3), **given)
    job.wait_until(reached(run_dir, 3))
    line = error_of(begin(trainer__workers=1, **given))
    assert f"run_dir {run_dir} is in use by job" in line and f"process {job.pid} on host" in line
    Path(line.rpartition(" ")[2]).unlink()
    assert "no longer belongs to this job" in error_of(job, code=1)  # the exit code is torchrun's
    assert "mingpt/training/trainer.py" not in job.err()  # we print no traceback; torchrun prints its own
    assert len(generations(run_dir)) == 1 and snapshot_steps(run_dir)
    assert "is in use" not in (run_dir / "log.txt").read_text()
