"""Mistakes that only the user can put right: one sentence, once, exit code 2, nothing lost, no restart."""

from pathlib import Path
from typing import Any

import pytest
from support.golden import Golden
from support.jobs import (
    ROOT,
    Begin,
    Finish,
    Job,
    assert_same_run,
    contents,
    error_of,
    snapshot_steps,
    torchrun,
)


def sentence(job: Job) -> str:
    error = error_of(job)
    assert job.out() == "" and len(job.err().splitlines()) == 1, job.err()
    return error.replace(str(ROOT), "ROOT")


@pytest.mark.parametrize(
    "settings", [{"data__path": "nowhere.txt"}, {"data__path": "nowhere.txt", "trainer__workers": 2}]
)
def test_a_run_that_cannot_begin_is_refused_and_leaves_no_run(
    settings: dict[str, Any], begin: Begin, tmp_path: Path, golden: Golden
) -> None:
    golden(sentence(begin(**({"trainer__workers": 1} | settings))))
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left <= {"log.txt", "claim-000001.json"}, "a claim that was given up keeps its number"


def test_the_snapshots_of_another_run_are_left_alone(begin: Begin, copied: Path, golden: Golden) -> None:
    before = contents(copied)
    golden(sentence(begin(trainer__workers=1, model__n_layer=3, optimizer__learning_rate=0.5)))
    after = contents(copied)
    for files in (before, after):  # the refused job gives its claim up, and the number has grown
        (claim,) = (path for path in files if path.name.startswith("claim-"))
        del files[claim]
    assert after == before


def test_under_torchrun_the_sentence_comes_once_and_the_job_ends(begin: Begin, golden: Golden) -> None:
    """The job ends although many restarts are left."""
    job = begin(launcher=torchrun(2, restarts=50), trainer__micro_batch_size=8)
    assert job.wait(60) != 0
    # torchrun's agent may abort at its own end, with a line of Python's that has "error: " in it, too.
    golden("\n".join(line for line in job.err().splitlines() if line.startswith("error: ")))


@pytest.mark.slow
def test_a_run_without_a_valid_snapshot_left_does_not_start_again_by_itself(
    begin: Begin, finish: Finish, undisturbed: Path, copied: Path
) -> None:
    """This holds also if the snapshots were set aside before; snapshot.resume=never begins anew."""
    snapshots = copied / "snapshots"
    for step in snapshot_steps(copied):
        (snapshots / f"step_{step:08d}.safetensors").write_bytes(b"damaged")
    before = contents(snapshots)
    error = error_of(begin(trainer__workers=1))
    assert error.startswith(f"no valid snapshot is left in {snapshots} (step ")
    assert "choose another run_dir, or begin anew by snapshot.resume=never" in error
    assert contents(snapshots) == before
    for path in before:
        path.rename(path.with_name(f"damaged-1-{path.name}"))
    assert "(run.json tells of one of step 30, which no node has)" in error_of(begin(trainer__workers=1))
    finish(trainer__workers=1, snapshot__resume="never")
    assert_same_run(copied, undisturbed)
