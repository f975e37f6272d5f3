"""What only the user can put right: one sentence, once, exit code 2, nothing lost; no restart repeats it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Start, command

from mingpt.tools.jobs import Job, torchrun

Refuse = Callable[..., str]


def sentence(job: Job) -> str:
    """The one line that a refused run prints."""
    code = job.wait(60)
    assert code == 2 and job.out() == "", job.err()
    lines = job.err().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), job.err()
    return lines[0].removeprefix("error: ")


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refuse(start: Start, text: Path, tmp_path: Path) -> Refuse:
    """The sentence with which a single process refuses these settings; nothing may have been written."""

    def run(*words: Any, **settings: Any) -> str:
        defaults: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text}
        answer = sentence(start(command(*words, **(defaults | {"trainer__workers": 1} | settings))))
        assert not any(contents(tmp_path / "run").values())
        return answer

    return run


def test_unknown_setting(refuse: Refuse) -> None:
    assert refuse(model__n_heads=3) == "unknown setting 'model.n_heads'; did you mean 'model.n_head'?"


def test_a_missing_text(refuse: Refuse) -> None:
    answer = refuse(data__path="nowhere.txt")
    assert answer == f"data.path nowhere.txt does not exist (relative paths start at {ROOT})"


def test_a_url_without_its_driver_names_the_package(refuse: Refuse) -> None:
    answer = refuse(data__path="gcs://bucket/text")
    assert answer.startswith("data.path gcs://bucket/text needs a driver that is not installed")
    assert "gcsfs" in answer
    assert "gcsfs" in refuse(snapshot__path="gcs://bucket/snapshots")


def test_nothing_to_resume_or_to_evaluate(refuse: Refuse) -> None:
    assert "snapshot.resume=must needs one" in refuse(snapshot__resume="must")
    assert "no valid snapshot" in refuse(trainer__eval_only=True)


def test_a_snapshot_folder_that_cannot_be_written(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refuse(snapshot__path=tmp_path / "file" / "snapshots")
    assert "run_dir" in refuse(run_dir=tmp_path / "file" / "run")


OTHER_MODEL = "model.n_layer: 2 -> 3; optimizer.learning_rate: 0.007 -> 0.5"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model__n_layer": 3, "optimizer__learning_rate": 0.5}, OTHER_MODEL),
        ({"snapshot__resume": "never"}, "snapshot.resume=never refuses one"),
        ({"data__path": "other"}, "is not the data that the snapshots"),
    ],
)
def test_the_snapshots_of_another_run_are_left_alone(
    settings: dict[str, Any],
    expected: str,
    start: Start,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    (tmp_path / "other").write_text(text.read_text()[1:])
    if "data__path" in settings:
        settings = {"data__path": tmp_path / "other"}
    before = contents(run_dir)
    defaults: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__workers": 1}
    assert expected in sentence(start(command(**(defaults | settings))))
    assert contents(run_dir) == before


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model__n_heads": 3}, "unknown setting 'model.n_heads'"),
        ({"trainer__micro_batch_size": 8}, "2 workers cannot share the 1 micro-batches"),
    ],
)
def test_under_torchrun_the_sentence_comes_once_and_the_job_ends(
    settings: dict[str, Any], expected: str, start: Start, text: Path, tmp_path: Path
) -> None:
    """Whatever restarts are left."""
    given: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text} | settings
    job = start(command(launcher=torchrun(2, restarts=50), **given))
    assert job.wait(60) != 0
    assert job.err().count(expected) == 1 and job.err().count("error: ") == 1, job.err()
