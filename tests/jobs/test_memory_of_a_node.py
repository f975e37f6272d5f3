"""Snapshots in the memory of a node, in whole jobs."""

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Finish,
    Start,
    assert_same_run,
    changed_program,
    command,
    final_hash,
    reached,
    snapshot_steps,
)
from support.jobs import read_history

from mingpt.tools.jobs import torchrun

SLOW_STEPS = """
import time
events.subscribe("step_end", lambda step: time.sleep(0.2))
"""


FSDP = {"trainer__parallel": "fsdp"}
DDP = {"trainer__parallel": "ddp"}
SHARDED_OPTIMIZER = DDP | {"trainer__shard_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "victim"),
    [pytest.param(DDP, 1, marks=pytest.mark.weekly), (FSDP, 0), (SHARDED_OPTIMIZER, 1)],
    ids=["ddp", "fsdp", "sharded optimizer"],
)
def test_a_killed_worker_comes_back_from_memory_and_an_orderly_end_leaves_none(
    strategy: dict[str, Any], victim: int, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first worker writes the whole state, or each worker its part. The disk is empty until the end."""
    shm, run_dir = tmp_path / "shm", tmp_path / "run"
    shm.mkdir()
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "snapshot__every": 1000} | strategy
    settings |= {"snapshot__memory_every": 2, "snapshot__memory_path": shm}
    job = start(command(launcher=torchrun(2, restarts=3), **settings))
    job.wait_until(reached(run_dir, 9))
    os.kill(job.workers()[victim], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    assert "Traceback" not in job.err() and "could not be written" not in job.err(), job.err()
    first, second = read_history(run_dir)["generations"]
    assert first["end"] == f"worker {victim} vanished" and second["end"] == "finished"
    assert second["restart"] and second["from_step"] >= 6 and second["from_step"] % 2 == 0
    assert first["to_step"] - second["from_step"] <= 4
    assert snapshot_steps(run_dir) == [30] and list(shm.iterdir()) == []
    assert_same_run(run_dir, undisturbed)


@pytest.mark.weekly
def test_what_is_in_memory_is_for_any_number_of_workers_and_any_strategy(
    start: Start, finish: Finish, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The job is killed as a whole after each stage; nothing is on disk before the end."""
    stages: list[tuple[int, dict[str, Any]]] = [(2, FSDP), (3, SHARDED_OPTIMIZER), (1, FSDP), (2, DDP)]
    shm, run_dir = tmp_path / "shm", tmp_path / "run"
    shm.mkdir()
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "snapshot__every": 1000}
    settings |= {"snapshot__memory_every": 2, "snapshot__memory_path": shm}
    program = changed_program(tmp_path, SLOW_STEPS)
    for number, (workers, strategy) in enumerate(stages[:-1]):
        job = start(command(launcher=torchrun(workers), program=program, **settings | strategy))
        job.wait_until(lambda at=number: len(read_history(run_dir)["generations"]) > at)  # type: ignore[misc]
        job.wait_until(reached(run_dir, 8 * (number + 1)))
        job.kill()
        assert snapshot_steps(run_dir) == []
    # A request before the first step leaves what memory holds where it is.
    (run_dir / "STOP").touch()
    left_alone = finish(launcher=torchrun(2), **settings)
    assert left_alone.err().count("stopped by STOP before the first step") == 1
    assert len(list(shm.iterdir())) == 1 and snapshot_steps(run_dir) == []
    workers, strategy = stages[-1]
    finish(launcher=torchrun(workers), **settings | strategy)
    generations = read_history(run_dir)["generations"]
    assert [entry["workers"] for entry in generations] == [workers for workers, _ in stages]
    for number, (before, after) in enumerate(itertools.pairwise(generations)):
        assert 8 * (number + 1) - 3 <= after["from_step"] <= before["to_step"], generations
    assert snapshot_steps(run_dir) == [30] and list(shm.iterdir()) == []
    assert final_hash(run_dir) == final_hash(undisturbed)
