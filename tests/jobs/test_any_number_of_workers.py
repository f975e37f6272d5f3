"""A run's result does not depend on the number of workers: the same losses and the same bits."""

import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, assert_same_run, changed_program, final_hash
from support.jobs import free_port, read_metric

from mingpt.tools.jobs import torchrun

RUN_FILES = {"config.yaml", "run.json", "metrics.jsonl", "log.txt", "loss.png"}


@pytest.mark.parametrize("workers", [1, 3, pytest.param(4, marks=pytest.mark.weekly)])
def test_curve_and_bits_are_the_same_for_any_number_of_workers(
    workers: int, finish: Finish, undisturbed: Path, tmp_path: Path
) -> None:
    """One process, and torchrun with its default rendezvous."""
    under_torchrun = torchrun(workers, options=[f"--master_port={free_port()}"])
    launcher = under_torchrun if workers > 1 else [sys.executable]
    job = finish(launcher=launcher, run_dir=tmp_path, trainer__workers=1)
    assert workers != 3 or "2 or 3 of a step's 8 micro-batches" in job.err()
    assert (tmp_path / "loss.png").stat().st_size > 10_000
    assert {path.name for path in tmp_path.iterdir()} >= RUN_FILES
    assert_same_run(tmp_path, undisturbed)


# This allows more workers than micro-batches, as in a later generation when nodes have joined.
ANY_NUMBER = """
import mingpt.training.plan
mingpt.training.plan.check_workers = lambda *_: None
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"trainer__parallel": "fsdp"}, marks=pytest.mark.weekly),
        pytest.param({"trainer__shard_optimizer": True}, marks=pytest.mark.weekly),
    ],
    ids=["ddp", "fsdp", "sharded optimizer"],
)
def test_workers_without_micro_batches_take_part_and_change_nothing(
    settings: dict[str, Any], finish: Finish, tmp_path: Path
) -> None:
    settings = settings | {"trainer__micro_batch_size": 4, "trainer__max_steps": 4, "trainer__workers": 1}
    program = changed_program(tmp_path, ANY_NUMBER)
    for name, launcher in {"1": [sys.executable], "3": torchrun(3)}.items():
        job = finish(launcher=launcher, program=program, run_dir=tmp_path / name, **settings)
        assert ("and 0 or 1 of a step's" in job.err()) == (name == "3")
    assert final_hash(tmp_path / "3", 4) == final_hash(tmp_path / "1", 4)
    assert sorted(read_metric(tmp_path / "3")) == [1, 2, 3, 4]
