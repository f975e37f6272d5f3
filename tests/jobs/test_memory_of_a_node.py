"""Snapshots in the memory of a node, in whole jobs."""

import os
import signal
from pathlib import Path

import pytest
from support.jobs import last_step
from support.small_jobs import Begin, Finish, assert_same_run, generations, reached, snapshot_steps

from mingpt.tools.jobs import torchrun


@pytest.mark.slow
def test_killed_workers_and_the_next_job_go_on_from_memory_and_an_orderly_end_leaves_none(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """Rank 0, which is killed, writes the whole state there. The next job has more workers, and other ones.

    Nothing is saved on disk until the end.
    """
    memory = tmp_path / "shm"
    memory.mkdir()
    settings = {"snapshot__every": 1000, "snapshot__memory_every": 2, "snapshot__memory_path": memory}
    job = begin(launcher=torchrun(2, restarts=3), trainer__parallel="fsdp", **settings)
    job.wait_until(reached(run_dir, 9))
    os.kill(job.workers()[0], signal.SIGKILL)
    job.wait_until(lambda: len(generations(run_dir)) == 2 and last_step(run_dir) >= 16)
    job.kill()
    assert "Traceback" not in job.err() and "could not be written" not in job.err(), job.err()
    assert snapshot_steps(run_dir) == []
    finish(launcher=torchrun(3), trainer__shard_optimizer=True, **settings)
    first, second, third = generations(run_dir)
    assert [first["end"], third["end"]] == ["worker 0 vanished", "finished"]
    assert second["restart"] and not third["restart"]
    for before, after in ((first, second), (second, third)):
        # One save may have been under way, and the one before left out because steps are as fast as saves.
        assert before["to_step"] - 6 <= after["from_step"] and after["from_step"] % 2 == 0
        assert after["from_step"] >= 4
    assert snapshot_steps(run_dir) == [30] and list(memory.iterdir()) == []
    assert_same_run(run_dir, undisturbed)
