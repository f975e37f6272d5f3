"""A run's result does not depend on the number of workers: the same losses and the same bits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.jobs import free_port
from support.small_jobs import Finish, assert_same_run, final_hash

from mingpt.tools.jobs import torchrun

RUN_FILES = {"config.yaml", "run.json", "metrics.jsonl", "log.txt", "loss.png"}


@pytest.mark.parametrize("workers", [1, 3])
def test_curve_and_bits_are_the_same_for_any_number_of_workers(
    workers: int, finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    """One process, and torchrun with its default rendezvous."""
    under_torchrun = torchrun(workers, options=[f"--master_port={free_port()}"])
    job = finish(launcher=under_torchrun if workers > 1 else [sys.executable], trainer__workers=1)
    assert workers != 3 or "2 or 3 of a step's 8 micro-batches" in job.err()
    assert (run_dir / "loss.png").stat().st_size > 10_000
    assert {path.name for path in run_dir.iterdir()} >= RUN_FILES
    assert_same_run(run_dir, undisturbed)


# This allows more workers than micro-batches, as in a later generation when nodes have joined.
ANY_NUMBER = """
import mingpt.training.plan
mingpt.training.plan.check_workers = lambda *_: None
"""


@pytest.mark.slow
def test_workers_without_micro_batches_take_part_and_change_nothing(
    finish: Finish, reference: Callable[..., Path], run_dir: Path
) -> None:
    settings: dict[str, Any] = {"trainer__micro_batch_size": 4, "trainer__max_steps": 4}
    job = finish(code=ANY_NUMBER, launcher=torchrun(3), trainer__parallel="fsdp", **settings)
    assert "and 0 or 1 of a step's" in job.err()
    assert final_hash(run_dir, 4) == final_hash(reference(1, **settings), 4)
