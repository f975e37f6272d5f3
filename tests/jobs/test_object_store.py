"""Snapshots at URLs."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, command, final_hash
from support.object_store import object_store

from mingpt.tools.jobs import torchrun


@pytest.mark.weekly
def test_a_run_whose_snapshots_live_in_an_object_store_resumes(
    start: Start,
    finish: Finish,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with object_store(monkeypatch) as bucket:
        bucket.mkdir("runs")
        place = "s3://runs/one"
        job = start(command(launcher=torchrun(2), run_dir=tmp_path, data__path=text, snapshot__path=place))
        job.wait_until(lambda: bucket.exists("runs/one/step_00000010.json"))
        job.kill()
        resumed = finish(launcher=torchrun(2), run_dir=tmp_path, snapshot__path=place)
        assert "resumed from step" in resumed.err()
        content = bucket.cat_file("runs/one/step_00000030.safetensors")
        expected = (undisturbed / "snapshots" / "step_00000030.safetensors").read_bytes()
        assert content == expected and final_hash(undisturbed)
        assert not list(tmp_path.glob("snapshots/*"))


@pytest.mark.slow
def test_a_url_in_memory_serves_one_process_and_no_job(
    start: Start, finish: Finish, text: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__max_steps": 5}
    settings |= {"snapshot__path": "memory://one"}
    finish(**settings)  # trainer.workers=auto means one worker here
    refused = start(command(launcher=torchrun(1), **settings))
    assert refused.wait() != 0
    assert "snapshot.path memory://one lives in the memory of one process" in refused.err()
