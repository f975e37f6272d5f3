"""`python train.py` without a launcher: several workers, restarts, and the exit codes of a single process."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.jobs import children, descendants, read_history, wait_until
from support.small_jobs import (
    SMALL,
    Begin,
    Start,
    all_gone,
    assert_same_run,
    command,
    error_of,
    generations,
    reached,
)

from mingpt.base.system import usable_cores
from mingpt.tools.jobs import torchrun

TORCHRUN_OUTPUT = ("OMP_NUM_THREADS", "torch.distributed.elastic", "torchelastic", "ChildFailedError", "****")
GLOG_PREFIX = re.compile(r"^\S*[WEI]\d{4} ", re.MULTILINE)  # as in "W1121 12:34:56.789"


@pytest.mark.parametrize(
    ("launcher", "victim"), [([sys.executable], 0), pytest.param(torchrun(2, 3), 1, marks=pytest.mark.slow)]
)
def test_a_killed_worker_costs_no_bit(
    launcher: Sequence[str], victim: int, begin: Begin, undisturbed: Path, run_dir: Path
) -> None:
    job = begin(launcher=launcher, trainer__workers=2)
    job.wait_until(reached(run_dir, 12))
    workers, pids = job.workers(), descendants(job.pid)
    assert len(workers) == 2 and set(workers) <= set(children(job.pid))
    os.kill(workers[victim], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    wait_until(lambda: all_gone(pids))
    assert_same_run(run_dir, undisturbed)
    history = read_history(run_dir)
    first, second = history["generations"]
    assert history["status"] == "finished" and first["workers"] == second["workers"] == 2
    assert first["restart"] is False and second["restart"] is True and history["seconds_lost"] > 0
    assert first["end"] == f"worker {victim} vanished" and "Traceback" not in job.err()
    where = f"at step {first['to_step']}; resumed from {second['from_step']} with 2 workers"
    assert job.err().count(f"worker {victim} vanished {where}\n") == 1
    if launcher == [sys.executable]:
        said = job.err()
        assert not any(text in said for text in TORCHRUN_OUTPUT) and not GLOG_PREFIX.search(said), said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "redirection"),
    [
        ([sys.executable], ">&- 2>&-"),
        (torchrun(2), ">/dev/full 2>/dev/full"),
        ([sys.executable], "2>&1 | true"),
    ],
)
def test_training_goes_on_without_standard_streams(
    launcher: Sequence[str], redirection: str, start: Start, text: Path, undisturbed: Path, run_dir: Path
) -> None:
    words = shlex.join(command(launcher=launcher, trainer__workers=2, run_dir=run_dir, data__path=text))
    job = start(["bash", "-c", f"set -o pipefail; {words} {redirection}"])
    assert job.wait() == 0, job.err()
    assert_same_run(run_dir, undisturbed)
    assert "finished at step 30" in (run_dir / "log.txt").read_text()


def test_a_question_starts_nothing(begin: Begin, run_dir: Path) -> None:
    launcher = [sys.executable, "-X", "importtime"]  # lists on stderr what is imported
    job = begin("--print_config", launcher=launcher, trainer__workers=2)
    assert job.wait(30) == 0 and "trainer" in job.out()
    modules = {line.rpartition("|")[2].strip() for line in job.err().splitlines()}
    assert "mingpt.config.cli" in modules and not modules & {"torch", "mingpt.launch.agent"}
    assert not run_dir.exists()


def test_tasks_that_srun_has_not_told_of_each_other_are_refused(begin: Begin, run_dir: Path) -> None:
    job = begin(trainer__workers="auto", env={"SLURM_STEP_NUM_TASKS": "4"})
    assert error_of(job).startswith("srun has started 4 tasks without torchrun")
    assert len(job.err().splitlines()) == 1 and not run_dir.exists()


@pytest.mark.slow
def test_by_default_the_machine_is_used_and_under_nohup_a_hangup_changes_nothing(
    begin: Begin, undisturbed: Path, run_dir: Path
) -> None:
    job = begin(launcher=["nohup", sys.executable], trainer__workers="auto")
    job.wait_until(reached(run_dir, 8))
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait() == 0, job.err()
    (generation,) = generations(run_dir)
    micro_batches = SMALL["trainer.batch_size"] // SMALL["trainer.micro_batch_size"]
    assert generation["workers"] == min(usable_cores(), micro_batches, 8)
    assert_same_run(run_dir, undisturbed)


def test_where_no_process_can_be_started_one_sentence_names_the_limit(begin: Begin) -> None:
    refuse = "def refuse(*_, **__): raise BlockingIOError(11, 'Resource temporarily unavailable')"
    job = begin(code=f"import subprocess\n{refuse}\nsubprocess.Popen.__init__ = refuse\n", trainer__workers=2)
    assert error_of(job, code=1).startswith("2 workers cannot be started: ") and "Traceback" not in job.err()
