"""A stop, by whatever means: one snapshot, no process left, and the same command goes on from there."""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Finish,
    Start,
    all_gone,
    assert_same_run,
    changed_program,
    command,
    final_hash,
    reached,
    snapshot_steps,
    wait_until,
)
from support.jobs import descendants, read_history, read_metric

from mingpt.distributed.signals import REPEAT_S
from mingpt.tools.jobs import torchrun

PLAIN, TORCHRUN = [sys.executable], torchrun(2)


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("SIGINT", PLAIN),
        pytest.param("SIGHUP", PLAIN, marks=pytest.mark.slow),
        pytest.param("STOP", PLAIN, marks=pytest.mark.slow),
        pytest.param("SIGTERM", TORCHRUN, marks=pytest.mark.slow),
        pytest.param("SIGUSR1", TORCHRUN, marks=pytest.mark.weekly),
    ],
)
def test_a_stop_is_one_snapshot_and_the_run_goes_on_from_that_step(
    kind: str,
    launcher: list[str],
    start: Start,
    finish: Finish,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "snapshot__every": 1000}
    settings |= {"launcher": launcher, "trainer__workers": 2}
    job = start(command(**settings))
    job.wait_until(reached(tmp_path, 8))
    pids = descendants(job.pid)
    if kind == "STOP":
        (tmp_path / "STOP").touch()
    else:  # a cluster and a terminal signal the agent; SIGUSR1 goes to a worker
        os.kill(job.workers()[1] if kind == "SIGUSR1" else job.pid, getattr(signal, kind))
    code = job.wait(30)
    assert (code == 0) == (kind != "SIGTERM") and all_gone(pids), job.err()
    assert launcher == TORCHRUN or "Traceback" not in job.err()
    history = read_history(tmp_path)
    (generation,) = history["generations"]
    stopped_at = generation["to_step"]
    assert history["status"] == "stopped" and generation["end"] == f"stopped by {kind}"
    assert 8 <= stopped_at < 30 and snapshot_steps(tmp_path) == [stopped_at]
    assert not (tmp_path / "STOP").exists()
    finish(**settings)
    history = read_history(tmp_path)
    assert history["generations"][1]["from_step"] == stopped_at and history["steps_lost"] == 0
    assert history["status"] == "finished"
    assert_same_run(tmp_path, undisturbed)


EVALUATION_S = 60
LONG_EVALUATION = f"""
import time
events.subscribe("evaluation_start", lambda step: time.sleep({EVALUATION_S}))
"""


@pytest.mark.parametrize(("kind", "workers"), [("SIGINT", 1), ("SIGTERM", 2)])
def test_a_second_signal_ends_the_job_at_once(
    kind: str, workers: int, start: Start, text: Path, tmp_path: Path
) -> None:
    """The first signal comes during a long evaluation, whose end the workers need to agree to stop."""
    program = changed_program(tmp_path, LONG_EVALUATION)
    settings: dict[str, Any] = {"trainer__eval_at_start": False, "trainer__eval_every": 1}
    settings |= {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": workers}
    job = start(command(program=program, **settings))
    job.wait_until(reached(tmp_path / "run", 1))  # the record of a step comes before its evaluation
    began = time.monotonic()
    pids = descendants(job.pid)
    assert len(job.workers()) == (0 if workers == 1 else workers)
    number = getattr(signal, kind)
    os.kill(job.pid, number)
    # Any sooner, both signals would count as one request.
    job.wait_until(lambda: time.monotonic() > began + REPEAT_S + 0.5)
    os.kill(job.pid, number)
    code = job.wait(30)
    assert time.monotonic() - began < EVALUATION_S / 2
    assert code == (128 + number if workers == 1 else 1)
    wait_until(lambda: all_gone(pids), timeout_s=10)
    assert read_history(tmp_path / "run")["status"] == "running" and snapshot_steps(tmp_path / "run") == []
    assert "Traceback" not in job.err(), job.err()


SLOW_EVALUATION_ALONE = """
import time
from pathlib import Path
def on_evaluation(step):
    Path({mark!r}).touch()
    time.sleep(60)
events.subscribe("evaluation_start", on_evaluation)
"""


@pytest.mark.slow
def test_an_evaluation_alone_is_stopped_by_the_first_signal(
    start: Start, text: Path, undisturbed: Path, copied: Path, tmp_path: Path
) -> None:
    """No step follows after which the workers could agree to stop."""
    mark = tmp_path / "evaluating"
    program = changed_program(tmp_path, SLOW_EVALUATION_ALONE.format(mark=str(mark)))
    settings: dict[str, Any] = {"run_dir": copied, "data__path": text, "trainer__workers": 1}
    job = start(command(program=program, trainer__eval_only=True, **settings))
    job.wait_until(mark.exists)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(30) == 0 and time.monotonic() - began < 15, job.err()
    assert final_hash(copied) == final_hash(undisturbed)


@pytest.mark.slow
def test_a_long_sample_is_cut_too(start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__sample_tokens": 1_000_000}
    job = start(command(trainer__workers=2, trainer__eval_at_start=False, **settings))
    job.wait_until(reached(tmp_path, 10))
    began = time.monotonic()
    (tmp_path / "STOP").touch()
    assert job.wait(30) == 0 and time.monotonic() - began < 4, job.err()
    assert snapshot_steps(tmp_path)[-1] == 10 and read_metric(tmp_path, "val/loss") == {}


PAUSE_S = 20
SLOW_STEPS = 'import time; events.subscribe("step_start", lambda step: time.sleep(0.7))'


@pytest.mark.parametrize(
    ("launcher", "kills"),
    [
        ([sys.executable], False),
        pytest.param([sys.executable], True, marks=pytest.mark.weekly),
        pytest.param(torchrun(2, 3), True, marks=pytest.mark.slow),
    ],
)
def test_the_job_stops_after_its_time_and_a_restart_does_not_begin_it_again(
    launcher: list[str],
    kills: bool,
    start: Start,
    finish: Finish,
    text: Path,
    undisturbed: Path,
    tmp_path: Path,
) -> None:
    """Without a kill the time is over before the first step."""
    run_dir, program = tmp_path / "run", changed_program(tmp_path, SLOW_STEPS)
    settings: dict[str, Any] = {"launcher": launcher, "run_dir": run_dir, "data__path": text}
    pause = f"0m{PAUSE_S}s" if kills else 0.1
    job = start(command(program=program, trainer__workers=2, trainer__pause_after=pause, **settings))
    if kills:
        job.wait_until(reached(run_dir, 7))
        os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait(60) == 0 and "; the same command goes on\n" in job.err(), job.err()
    history = read_history(run_dir)
    paused, step = history["generations"][-1], snapshot_steps(run_dir)[-1]
    assert (history["status"], paused["end"]) == ("stopped", "stopped by trainer.pause_after")
    assert step == paused["to_step"] and 5 * kills <= step < 30 and len(history["generations"]) == 1 + kills
    if kills:  # from its own start the second generation had less time than the job
        assert paused["seen"] - history["job_began"] >= PAUSE_S
        assert paused["seconds"] + paused["phases"]["start_s"] < PAUSE_S - 2
    finish(trainer__workers=1 if kills else 2, **settings)
    assert_same_run(run_dir, undisturbed)
