"""A run's result does not depend on the number of workers: the same losses and the same bits."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Start, changed_program, command, final_hash

from mingpt.tools.jobs import free_port, read_metric, torchrun

RUN_FILES = {"config.yaml", "run.json", "metrics.jsonl", "log.txt", "loss.png"}


def launchers() -> dict[str, Sequence[str]]:
    """One process, and torchrun as it starts workers by default, with no word on the rendezvous."""
    under_torchrun = {
        str(workers): torchrun(workers, options=[f"--master_port={free_port()}"]) for workers in (3, 4)
    }
    return {"no torchrun": [sys.executable], **under_torchrun}


@pytest.mark.parametrize("workers", ["no torchrun", "3", pytest.param("4", marks=pytest.mark.slow)])
def test_curve_and_bits_are_the_same_for_any_number_of_workers(
    workers: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    launcher = launchers()[workers]
    job = start(command(launcher=launcher, run_dir=tmp_path, data__path=text, trainer__workers=1))
    assert job.wait() == 0, job.err()
    assert workers != "4" or "worker 3 reads 6-7" in job.err()
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} >= RUN_FILES
    for name in ("train/loss", "val/loss"):
        expected, curve = read_metric(undisturbed, name), read_metric(tmp_path, name)
        assert len(expected) >= 4 and curve == expected
    assert final_hash(tmp_path) == final_hash(undisturbed)


# As in a later generation, when nodes have joined.
ANY_NUMBER = """
import mingpt.training.start
mingpt.training.start.check_workers = lambda *_: None
"""


@pytest.mark.parametrize("reduction", ["exact", pytest.param("fast", marks=pytest.mark.slow)])
def test_workers_without_micro_batches_idle_and_change_nothing(
    reduction: str, start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(tmp_path, ANY_NUMBER)
    for workers in (3, 1):
        words = command(
            launcher=torchrun(3) if workers == 3 else (sys.executable,),
            program=program,
            run_dir=tmp_path / str(workers),
            data__path=text,
            trainer__micro_batch_size=4,
            trainer__max_steps=4,
            trainer__reduction=reduction,
            trainer__workers=1,  # of plain `python`
        )
        job = start(words)
        assert job.wait() == 0, job.err()
        assert ("idles" in job.err()) == (workers == 3)
    assert reduction == "fast" or final_hash(tmp_path / "3", 4) == final_hash(tmp_path / "1", 4)
    one, three = read_metric(tmp_path / "1"), read_metric(tmp_path / "3")
    assert sorted(one) == sorted(three) == [1, 2, 3, 4]
    assert all(abs(one[step] - three[step]) < 1e-3 for step in one)
