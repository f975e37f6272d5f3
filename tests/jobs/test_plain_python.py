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
    Finish,
    Start,
    all_gone,
    assert_same_run,
    changed_program,
    command,
    error_of,
    final_hash,
    reached,
    snapshot_steps,
    wait_until,
)
from support.jobs import children, descendants, read_history

from mingpt.base.system import usable_cores
from mingpt.tools.jobs import torchrun

TORCHRUN_OUTPUT = ("OMP_NUM_THREADS", "torch.distributed.elastic", "torchelastic", "ChildFailedError", "****")
GLOG_PREFIX = re.compile(r"^\S*[WEI]\d{4} ", re.MULTILINE)  # as in "W1121 12:34:56.789"


@pytest.mark.slow
def test_plain_python_computes_the_bits_of_torchrun(
    finish: Finish, undisturbed: Path, tmp_path: Path
) -> None:
    finish(run_dir=tmp_path, trainer__workers="auto")
    (generation,) = read_history(tmp_path)["generations"]
    micro_batches = SMALL["trainer.batch_size"] // SMALL["trainer.micro_batch_size"]
    assert generation["workers"] == min(usable_cores(), micro_batches, 8)
    assert_same_run(tmp_path, undisturbed)


def test_a_killed_worker_comes_back_costs_no_bit_and_torchrun_says_nothing(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    job = start(command(run_dir=tmp_path, data__path=text, trainer__workers=2))
    job.wait_until(reached(tmp_path, 12))
    workers = job.workers()
    assert len(workers) == 2 and set(workers) <= set(children(job.pid))
    pids = descendants(job.pid)
    os.kill(workers[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    wait_until(lambda: all_gone(pids))
    history = read_history(tmp_path)
    first, second = history["generations"]
    assert history["status"] == "finished" and first["end"] == "worker 0 vanished"
    assert first["restart"] is False and second["restart"] is True
    assert_same_run(tmp_path, undisturbed)
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


@pytest.mark.parametrize(
    "kind", ["SIGINT", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("SIGHUP", "STOP"))]
)
def test_a_stop_is_exit_code_0_and_one_snapshot(kind: str, start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"snapshot__every": 1000, "trainer__workers": 2, "trainer__max_steps": 10_000}
    job = start(command(run_dir=tmp_path, data__path=text, **settings))
    job.wait_until(reached(tmp_path, 8))
    pids = descendants(job.pid)
    if kind == "STOP":
        (tmp_path / "STOP").touch()
    else:
        os.kill(job.pid, getattr(signal, kind))
    assert job.wait(30) == 0, job.err()
    assert all_gone(pids)
    history = read_history(tmp_path)
    (generation,) = history["generations"]
    assert history["status"] == "stopped" and generation["end"] == f"stopped by {kind}"
    assert snapshot_steps(tmp_path) == [generation["to_step"]] and generation["to_step"] >= 8
    assert not (tmp_path / "STOP").exists()
    assert_quiet(job.err())


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
def test_under_nohup_a_hangup_changes_nothing(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    words = command(launcher=["nohup", sys.executable], run_dir=tmp_path, data__path=text, trainer__workers=2)
    job = start(words)
    job.wait_until(reached(tmp_path, 8))
    os.kill(job.pid, signal.SIGHUP)
    assert job.wait() == 0, job.err()
    assert len(read_history(tmp_path)["generations"]) == 1
    assert final_hash(tmp_path) == final_hash(undisturbed)


def test_where_no_process_can_be_started_one_sentence_names_the_limit(start: Start, tmp_path: Path) -> None:
    refuse = "def refuse(*_, **__): raise BlockingIOError(11, 'Resource temporarily unavailable')"
    program = changed_program(tmp_path, f"import subprocess\n{refuse}\nsubprocess.Popen.__init__ = refuse\n")
    job = start(command(program=program, run_dir=tmp_path / "run", trainer__workers=2))
    assert error_of(job, code=1).startswith("2 workers cannot be started: ") and "Traceback" not in job.err()
