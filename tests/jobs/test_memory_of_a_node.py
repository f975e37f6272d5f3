"""Snapshots in the memory of a node, in whole jobs."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Job
from support.small_jobs import Begin, Finish, assert_same_run, generations, reached, snapshot_steps

from mingpt.tools.jobs import torchrun

FSDP, SHARDED_OPTIMIZER = {"trainer__parallel": "fsdp"}, {"trainer__shard_optimizer": True}


@pytest.fixture
def in_memory(tmp_path: Path) -> dict[str, Any]:
    """Settings with which nothing is saved on disk until the end."""
    memory = tmp_path / "shm"
    memory.mkdir()
    return {"snapshot__every": 1000, "snapshot__memory_every": 2, "snapshot__memory_path": memory}


def begin_in_memory(begin: Begin, run_dir: Path, restarts: int, **settings: Any) -> Job:
    """A job of two workers under fsdp, which has saved the state to memory."""
    job = begin(launcher=torchrun(2, restarts), **FSDP, **settings)
    job.wait_until(reached(run_dir, 9))
    return job


@pytest.mark.slow
def test_a_killed_worker_comes_back_from_memory_and_an_orderly_end_leaves_none(
    begin: Begin, in_memory: dict[str, Any], undisturbed: Path, run_dir: Path
) -> None:
    """The first worker of the node, which is killed, writes the whole state there."""
    job = begin_in_memory(begin, run_dir, restarts=3, **in_memory)
    os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    assert "Traceback" not in job.err() and "could not be written" not in job.err(), job.err()
    first, second = generations(run_dir)
    assert first["end"] == "worker 0 vanished" and second["end"] == "finished" and second["restart"]
    # One save may have been under way, and the one before left out because steps are as fast as saves.
    assert second["from_step"] >= 4 and second["from_step"] % 2 == 0
    assert first["to_step"] - second["from_step"] <= 6
    assert snapshot_steps(run_dir) == [30] and not list(in_memory["snapshot__memory_path"].iterdir())
    assert_same_run(run_dir, undisturbed)


@pytest.mark.slow
def test_other_workers_with_another_strategy_go_on_from_the_memory_of_a_killed_job(
    begin: Begin, finish: Finish, in_memory: dict[str, Any], undisturbed: Path, run_dir: Path
) -> None:
    """The snapshot is whole. The next job begins on the same node, and there is no snapshot on disk."""
    begin_in_memory(begin, run_dir, restarts=0, **in_memory).kill()
    assert snapshot_steps(run_dir) == []
    finish(launcher=torchrun(3), **SHARDED_OPTIMIZER, **in_memory)
    _, last = generations(run_dir)
    assert last["from_step"] >= 4 and last["from_step"] % 2 == 0 and not last["restart"]
    assert snapshot_steps(run_dir) == [30] and not list(in_memory["snapshot__memory_path"].iterdir())
    assert_same_run(run_dir, undisturbed)
