"""`python train.py` without a launcher: several workers, restarts, and what is refused."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.jobs import (
    Begin,
    all_gone,
    assert_same_run,
    children,
    descendants,
    error_of,
    generations,
    reached,
    read_history,
    wait_until,
)

from mingpt.base.system import usable_cores
from mingpt.config.cli import build
from mingpt.distributed import Launch
from mingpt.launch.agent import choose_workers


def test_a_killed_worker_costs_no_bit(begin: Begin, undisturbed: Path, run_dir: Path) -> None:
    job = begin(trainer__workers=2)
    job.wait_until(reached(run_dir, 12))
    workers, pids = job.workers(), descendants(job.pid)
    assert len(workers) == 2 and set(workers) <= set(children(job.pid))
    os.kill(workers[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    wait_until(lambda: all_gone(pids))
    assert_same_run(run_dir, undisturbed)
    history = read_history(run_dir)
    first, second = history["generations"]
    assert history["status"] == "finished" and first["workers"] == second["workers"] == 2
    assert first["restart"] is False and second["restart"] is True and history["seconds_lost"] > 0
    assert first["end"] == "worker 0 vanished" and "Traceback" not in job.err()


def test_tasks_that_srun_has_not_told_of_each_other_are_refused(begin: Begin, run_dir: Path) -> None:
    job = begin(trainer__workers="auto", env={"SLURM_STEP_NUM_TASKS": "4"})
    assert error_of(job).startswith("srun has started 4 tasks without torchrun")
    assert len(job.err().splitlines()) == 1 and not run_dir.exists()


def test_auto_is_no_more_workers_than_a_step_has_micro_batches() -> None:
    config = build({"trainer.device": "cpu", "trainer.batch_size": 2, "trainer.micro_batch_size": 2})
    assert choose_workers(config, Launch()) == 1


@pytest.mark.slow
def test_by_default_the_machine_is_used_and_under_nohup_a_hangup_changes_nothing(
    begin: Begin, undisturbed: Path, run_dir: Path
) -> None:
    job = begin(launcher=["nohup", sys.executable], trainer__workers="auto")
    job.wait_until(reached(run_dir, 8))
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait() == 0, job.err()
    (generation,) = generations(run_dir)
    assert generation["workers"] == min(usable_cores(), 8)
    assert_same_run(run_dir, undisturbed)
