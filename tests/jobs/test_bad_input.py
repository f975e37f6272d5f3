"""Mistakes that only the user can put right: one sentence, once, exit code 2, nothing lost, no restart."""

from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Start, changed_program, command, contents, error_of
from support.jobs import Job

from mingpt.tools.jobs import torchrun

MISSING = f"data.path nowhere.txt does not exist (relative paths start at {ROOT})"


def sentence(job: Job) -> str:
    """The one line that a refused run prints."""
    error = error_of(job)
    assert job.out() == "" and len(job.err().splitlines()) == 1, job.err()
    return error


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data__path": "nowhere.txt"}, MISSING),
        ({"data__path": "nowhere.txt", "trainer__workers": 2}, MISSING),
        ({"data__path": "gcs://bucket/text"}, "text needs a driver that is not installed"),
        ({"snapshot__path": "gcs://bucket/snapshots"}, "gcsfs"),
        ({"snapshot__resume": "must"}, "snapshot.resume=must needs one"),
        ({"trainer__eval_only": True}, "no valid snapshot"),
        ({"snapshot__path": "/dev/null/snapshots"}, "cannot be written to"),
        ({"run_dir": "/dev/null/run"}, "run_dir"),
    ],
)
def test_a_run_that_cannot_begin_is_refused_and_leaves_no_run(
    settings: dict[str, Any], expected: str, start: Start, text: Path, tmp_path: Path
) -> None:
    given: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 1}
    assert expected in sentence(start(command(**(given | settings))))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"log.txt", "claim-000001.json"}, "a claim that was given up keeps its number"


OTHER_MODEL = "model.n_layer: 2 -> 3; optimizer.learning_rate: 0.007 -> 0.5"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"model__n_layer": 3, "optimizer__learning_rate": 0.5}, OTHER_MODEL),
        ({"snapshot__resume": "never"}, "snapshot.resume=never does not go on from it"),
        ({"data__path": "other"}, "is not the data that the snapshots"),
    ],
)
def test_the_snapshots_of_another_run_are_left_alone(
    settings: dict[str, Any], expected: str, start: Start, text: Path, copied: Path, tmp_path: Path
) -> None:
    (tmp_path / "other").write_text(text.read_text()[1:])
    if "data__path" in settings:
        settings = {"data__path": tmp_path / "other"}
    before = contents(copied)
    given: dict[str, Any] = {"run_dir": copied, "data__path": text, "trainer__workers": 1}
    assert expected in sentence(start(command(**(given | settings))))
    after = contents(copied)
    for files in (before, after):  # the refused job gives its claim up, and the number has grown
        (claim,) = (path for path in files if path.name.startswith("claim-"))
        del files[claim]
    assert after == before


def test_a_strategy_that_is_not_registered_for_the_reduction_is_refused(
    start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(
        tmp_path, "from mingpt.parallel import STRATEGIES; del STRATEGIES['ddp', 'fast']"
    )
    given: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 1}
    error = error_of(start(command(program=program, trainer__reduction="fast", **given)))
    assert error.startswith(
        "trainer.parallel=ddp does not go with trainer.reduction=fast: take ddp and exact, or "
    )


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
    """The job ends although many restarts are left."""
    given: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text} | settings
    job = start(command(launcher=torchrun(2, restarts=50), **given))
    assert job.wait(60) != 0
    # torchrun's agent may abort at its own end, with a line of Python's that has "error: " in it, too.
    sentences = [line for line in job.err().splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and expected in sentences[0], job.err()
