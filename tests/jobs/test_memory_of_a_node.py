"""Snapshots in the memory of a node, in whole jobs."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, assert_same_run, command, reached, snapshot_steps
from support.jobs import read_history

from mingpt.tools.jobs import torchrun

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
    """The first worker of the node writes the whole state there. The disk is empty until the end."""
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
    # One save may have been under way, and the one before left out because steps are as fast as saves.
    assert second["restart"] and second["from_step"] >= 4 and second["from_step"] % 2 == 0
    assert first["to_step"] - second["from_step"] <= 6
    assert snapshot_steps(run_dir) == [30] and list(shm.iterdir()) == []
    assert_same_run(run_dir, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [((2, FSDP), (3, SHARDED_OPTIMIZER)), pytest.param((3, DDP), (2, FSDP), marks=pytest.mark.weekly)],
    ids=["fsdp, then a sharded optimizer", "ddp, then fsdp"],
)
def test_other_workers_with_another_strategy_go_on_from_the_memory_of_a_killed_job(
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
    start: Start,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    """The snapshot is whole. The next job begins on the same node, and there is no snapshot on disk."""
    shm, run_dir = tmp_path / "shm", tmp_path / "run"
    shm.mkdir()
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "snapshot__every": 1000}
    settings |= {"snapshot__memory_every": 2, "snapshot__memory_path": shm}
    (workers, strategy), (next_workers, next_strategy) = before, after
    job = start(command(launcher=torchrun(workers), **settings, **strategy))
    job.wait_until(reached(run_dir, 9))
    job.kill()
    assert snapshot_steps(run_dir) == []
    job = start(command(launcher=torchrun(next_workers), **settings, **next_strategy))
    assert job.wait() == 0, job.err()
    _, last = read_history(run_dir)["generations"]
    assert last["from_step"] >= 4 and last["from_step"] % 2 == 0 and not last["restart"]
    assert snapshot_steps(run_dir) == [30] and list(shm.iterdir()) == []
    assert_same_run(run_dir, undisturbed)
