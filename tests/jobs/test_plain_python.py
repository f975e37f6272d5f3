"""`python train.py` without a launcher: several workers, restarts, and the exit codes of a single process."""

import os
import re
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    SMALL,
    Start,
    all_gone,
    assert_same_run,
    changed_program,
    command,
    error_of,
    reached,
    wait_until,
)
from support.jobs import children, descendants, read_history

from mingpt.base.system import usable_cores
from mingpt.tools.jobs import torchrun

TORCHRUN_OUTPUT = ("OMP_NUM_THREADS", "torch.distributed.elastic", "torchelastic", "ChildFailedError", "****")
GLOG_PREFIX = re.compile(r"^\S*[WEI]\d{4} ", re.MULTILINE)  # as in "W1121 12:34:56.789"


@pytest.mark.parametrize(
    ("launcher", "victim"), [([sys.executable], 0), pytest.param(torchrun(2, 3), 1, marks=pytest.mark.slow)]
)
def test_a_killed_worker_costs_no_bit(
    launcher: Sequence[str], victim: int, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = start(command(launcher=launcher, run_dir=tmp_path, data__path=text, trainer__workers=2))
    job.wait_until(reached(tmp_path, 12))
    workers = job.workers()
    assert len(workers) == 2 and set(workers) <= set(children(job.pid))
    pids = descendants(job.pid)
    os.kill(workers[victim], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    wait_until(lambda: all_gone(pids))
    assert_same_run(tmp_path, undisturbed)
    history = read_history(tmp_path)
    first, second = history["generations"]
    assert history["status"] == "finished" and first["workers"] == second["workers"] == 2
    assert first["restart"] is False and second["restart"] is True and history["seconds_lost"] > 0
    assert first["end"] == f"worker {victim} vanished" and "Traceback" not in job.err()
    where = f"at step {first['to_step']}; resumed from {second['from_step']} with 2 workers"
    assert job.err().count(f"worker {victim} vanished {where}\n") == 1
    if launcher == [sys.executable]:
        assert_quiet(job.err())


@pytest.mark.slow
@pytest.mark.parametrize("redirection", [">&- 2>&-", ">/dev/full 2>/dev/full", "2>&1 | true"])
@pytest.mark.parametrize("launcher", [(sys.executable,), torchrun(2)])
def test_training_goes_on_without_standard_streams(
    launcher: Sequence[str], redirection: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"trainer__workers": 2, "run_dir": tmp_path, "data__path": text}
    words = shlex.join(command(launcher=launcher, **settings))
    job = start(["bash", "-c", f"set -o pipefail; {words} {redirection}"])
    assert job.wait() == 0, job.err()
    assert_same_run(tmp_path, undisturbed)
    assert "finished at step 30" in (tmp_path / "log.txt").read_text()


def assert_quiet(stderr: str) -> None:
    """Assert that there is nothing of torchrun's own output, no traceback, and at most one error."""
    assert not [words for words in TORCHRUN_OUTPUT if words in stderr], stderr
    assert not GLOG_PREFIX.search(stderr), stderr
    assert "Traceback" not in stderr and stderr.count("error: ") <= 1, stderr


def test_without_a_restart_left_a_killed_worker_is_exit_code_1(
    start: Start, text: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"trainer__workers": 2, "trainer__max_restarts": 0}
    job = start(command(run_dir=tmp_path, data__path=text, trainer__max_steps=10_000, **settings))
    job.wait_until(reached(tmp_path, 5))
    os.kill(job.workers()[1], signal.SIGKILL)
    assert job.wait(60) == 1, job.err()
    said = [line for line in job.err().splitlines() if "no restart is left (trainer.max_restarts)" in line]
    assert len(said) == 1, job.err()
    assert_quiet(job.err())


def test_a_signal_while_workers_start_ends_the_job(start: Start, text: Path, tmp_path: Path) -> None:
    job = start(command(run_dir=tmp_path, data__path=text, trainer__max_steps=10_000, trainer__workers=2))
    job.wait_until(lambda: len(job.workers()) == 2)
    pids = [job.pid, *descendants(job.pid)]
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(30) == 0, job.err()
    assert job.err() == "stopped by SIGINT before the first step: the same command goes on\n"
    wait_until(lambda: all_gone(pids), timeout_s=10)
    assert_quiet(job.err())


def test_a_question_starts_nothing(start: Start, text: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-X", "importtime"]  # lists on stderr what is imported
    words = command(
        "--print_config", launcher=launcher, run_dir=tmp_path / "run", data__path=text, trainer__workers=2
    )
    job = start(words)
    assert job.wait(30) == 0 and "trainer" in job.out()
    modules = {line.rpartition("|")[2].strip() for line in job.err().splitlines()}
    assert "mingpt.config.cli" in modules and not modules & {"torch", "mingpt.launch.agent"}
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun has started 4 tasks without torchrun"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "the launcher sets RANK and WORLD_SIZE but not MASTER_ADDR"),
    ],
)
def test_tasks_that_no_launcher_has_told_of_each_other_are_refused(
    variables: dict[str, str], sentence: str, start: Start, text: Path, tmp_path: Path
) -> None:
    job = start(command(run_dir=tmp_path / "run", data__path=text, trainer__workers="auto"), **variables)
    assert job.wait() == 2
    assert job.err().startswith(f"error: {sentence}") and len(job.err().splitlines()) == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_by_default_the_machine_is_used_and_under_nohup_a_hangup_changes_nothing(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__workers": "auto"}
    job = start(command(launcher=["nohup", sys.executable], **settings))
    job.wait_until(reached(tmp_path, 8))
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait() == 0, job.err()
    (generation,) = read_history(tmp_path)["generations"]
    micro_batches = SMALL["trainer.batch_size"] // SMALL["trainer.micro_batch_size"]
    assert generation["workers"] == min(usable_cores(), micro_batches, 8)
    assert_same_run(tmp_path, undisturbed)


def test_where_no_process_can_be_started_one_sentence_names_the_limit(start: Start, tmp_path: Path) -> None:
    refuse = "def refuse(*_, **__): raise BlockingIOError(11, 'Resource temporarily unavailable')"
    program = changed_program(tmp_path, f"import subprocess\n{refuse}\nsubprocess.Popen.__init__ = refuse\n")
    job = start(command(program=program, run_dir=tmp_path / "run", trainer__workers=2))
    assert error_of(job, code=1).startswith("2 workers cannot be started: ") and "Traceback" not in job.err()
