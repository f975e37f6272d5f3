"""A job that is started again, from its own snapshots or from the weights of another run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, assert_same_run, command, contents, final_hash, manifest
from support.jobs import read_history, read_metric

from mingpt.tools.jobs import torchrun


@pytest.mark.slow
def test_two_resumes_one_of_them_at_the_end_of_an_epoch(
    start: Start, finish: Finish, text: Path, tmp_path: Path
) -> None:
    """The whole job is killed twice; the batch size makes an epoch a whole number of steps."""
    settings: dict[str, Any] = {"data__path": tmp_path / "text", "trainer__batch_size": 10}
    settings |= {"snapshot__every": 1, "trainer__workers": 1}
    n_train = 10 * 12 * 32 + 1  # 120 windows: an epoch is 12 steps of 10
    (tmp_path / "text").write_text(text.read_text()[: n_train * 10 // 9 + 1])
    whole = finish(run_dir=tmp_path / "whole", **settings)
    assert "1 worker" in whole.err() and "12.0 steps per epoch" in whole.err()
    for stop in (12, 17):
        job = start(command(run_dir=tmp_path / "run", **settings, trainer__eval_every=1000))
        path = tmp_path / "run" / "snapshots" / f"step_{stop:08d}.json"
        job.wait_until(path.exists)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        for later in path.parent.glob("step_*"):  # the job may have written more before it was killed
            if int(later.name[5:13]) > stop:
                later.unlink()
        assert manifest(tmp_path / "run", stop)["windows"] == stop * 10
    finish(run_dir=tmp_path / "run", **settings)
    assert [entry["from_step"] for entry in read_history(tmp_path / "run")["generations"]] == [0, 12, 17]
    assert final_hash(tmp_path / "run") == final_hash(tmp_path / "whole")


@pytest.mark.slow
def test_a_damaged_snapshot_is_named_and_the_one_before_it_used(
    finish: Finish, undisturbed: Path, copied: Path
) -> None:
    last = copied / "snapshots" / "step_00000030.safetensors"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 4
    last.write_bytes(content)
    job = finish(launcher=torchrun(2), run_dir=copied)
    name = "damaged-1-step_00000030"
    assert f"snapshot of step 30 set aside as {copied}/snapshots/{name}.*: its " in job.err()
    assert "resumed from step 25" in job.err()
    assert_same_run(copied, undisturbed)
    assert (copied / "snapshots" / f"{name}.safetensors").exists()


@pytest.mark.slow
def test_a_finished_run_says_so_and_trains_on_only_if_a_longer_one_is_asked_for(
    finish: Finish, undisturbed: Path, copied: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": copied, "trainer__workers": 1}
    before = contents(copied)
    evaluation = finish(**settings, trainer__eval_only=True)
    assert contents(copied) == before
    assert f"val/loss {read_metric(undisturbed, 'val/loss')[30]:.4f}" in evaluation.err()
    assert "already stands at step 30" in finish(**settings).err()
    assert_same_run(copied, undisturbed)
    longer = finish(**settings, trainer__max_steps=32, snapshot__resume="changed")
    assert "trainer.max_steps: 30 -> 32" in longer.err()
    changes = read_history(copied)["changes"]
    assert changes == [{"step": 30, "settings": ["trainer.max_steps: 30 -> 32"]}]
    assert max(read_metric(copied)) == 32


def test_a_run_begins_with_the_weights_of_another(
    finish: Finish, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The other text lacks a character, but keeps all rows: the first loss is far below a fresh model's."""
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("F", "f"))
    settings: dict[str, Any] = {"data__path": other, "trainer__max_steps": 0, "trainer__workers": 1}
    for origin in (undisturbed, undisturbed / "snapshots" / "step_00000030.safetensors"):
        run_dir = tmp_path / origin.name
        finish(run_dir=run_dir, snapshot__init_from=origin, **settings)
        assert read_metric(run_dir, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]
