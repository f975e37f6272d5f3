"""A stop, by whatever means: one snapshot, no process left, and the same command goes on from there."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.jobs import (
    Begin,
    Finish,
    all_gone,
    assert_same_run,
    descendants,
    generations,
    reached,
    read_history,
    snapshot_steps,
    torchrun,
    wait_until,
)

from mingpt.distributed.signals import REPEAT_S

PLAIN, TORCHRUN = [sys.executable], torchrun(2)


@pytest.mark.parametrize(
    ("kind", "launcher"),
    [
        ("SIGINT", PLAIN),
        pytest.param("STOP", PLAIN, marks=pytest.mark.slow),
        pytest.param("SIGTERM", TORCHRUN, marks=pytest.mark.slow),
    ],
)
def test_a_stop_is_one_snapshot_and_the_run_goes_on_from_that_step(
    kind: str, launcher: list[str], begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    """One worker does the rest of the steps."""
    job = begin(snapshot__every=1000, launcher=launcher, trainer__workers=2)
    job.wait_until(reached(run_dir, 8))
    pids = descendants(job.pid)
    if kind == "STOP":
        (run_dir / "STOP").touch()
    else:  # a cluster and a terminal signal the agent
        os.kill(job.pid, getattr(signal, kind))
    code = job.wait(30)
    assert (code == 0) == (kind != "SIGTERM") and all_gone(pids), job.err()
    assert launcher == TORCHRUN or "Traceback" not in job.err()
    (stopped,) = generations(run_dir)
    assert read_history(run_dir)["status"] == "stopped" and stopped["end"] == f"stopped by {kind}"
    assert 8 <= stopped["to_step"] < 30 and snapshot_steps(run_dir) == [stopped["to_step"]]
    assert not (run_dir / "STOP").exists()
    finish(snapshot__every=1000, trainer__workers=1)
    history = read_history(run_dir)
    assert history["generations"][1]["from_step"] == stopped["to_step"] and history["steps_lost"] == 0
    assert_same_run(run_dir, undisturbed)


LONG_EVALUATION = """
import time
from pathlib import Path
def on_evaluation(step):
    Path({mark!r}).touch()
    time.sleep(60)
events.subscribe("evaluation_start", on_evaluation)
"""


@pytest.mark.parametrize(
    ("kind", "workers"), [(signal.SIGINT, 1), pytest.param(signal.SIGTERM, 2, marks=pytest.mark.slow)]
)
def test_a_second_signal_ends_the_job_at_once(
    kind: signal.Signals, workers: int, begin: Begin, run_dir: Path, tmp_path: Path
) -> None:
    """The first signal comes during a long evaluation, whose end the workers need to agree to stop."""
    evaluates = {"trainer__eval_at_start": False, "trainer__eval_every": 1}
    code = LONG_EVALUATION.format(mark=str(tmp_path / "mark"))
    job = begin(code=code, trainer__workers=workers, **evaluates)
    job.wait_until((tmp_path / "mark").exists)
    began, pids = time.monotonic(), descendants(job.pid)
    os.kill(job.pid, kind)
    # Any sooner, both signals would count as one request.
    job.wait_until(lambda: time.monotonic() > began + REPEAT_S + 0.5)
    os.kill(job.pid, kind)
    assert job.wait(30) == (128 + kind if workers == 1 else 1)
    wait_until(lambda: all_gone(pids), timeout_s=10)
    assert read_history(run_dir)["status"] == "running" and snapshot_steps(run_dir) == []
    assert "Traceback" not in job.err(), job.err()


PAUSE_S = 20
SLOW_STEPS = 'import time; events.subscribe("step_start", lambda step: time.sleep(0.7))'


@pytest.mark.slow
def test_the_job_stops_after_its_time_and_a_restart_does_not_begin_it_again(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    launcher = torchrun(2, 3)
    job = begin(code=SLOW_STEPS, launcher=launcher, trainer__pause_after=f"0m{PAUSE_S}s")
    job.wait_until(reached(run_dir, 7))
    os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait(60) == 0 and "; the same command goes on\n" in job.err(), job.err()
    history = read_history(run_dir)
    _, paused = history["generations"]
    assert (history["status"], paused["end"]) == ("stopped", "stopped by trainer.pause_after")
    assert 5 <= snapshot_steps(run_dir)[-1] == paused["to_step"] < 30
    # From its own start the second generation had less time than the job.
    assert paused["seen"] - history["job_began"] >= PAUSE_S
    assert paused["seconds"] + paused["phases"]["start_s"] < PAUSE_S - 2
    finish(trainer__workers=1)
    assert_same_run(run_dir, undisturbed)


SLOW_LOADING = """
import time
from pathlib import Path
import mingpt.training.facts
def take_long(*arguments, **options):
    Path({mark!r}).touch()
    time.sleep(60)
mingpt.training.facts.open_data = take_long
"""


def test_a_stop_during_the_start_is_obeyed_at_once(begin: Begin, run_dir: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    job = begin(code=SLOW_LOADING.format(mark=str(mark)), trainer__workers=2)
    job.wait_until(mark.exists)
    pids = descendants(job.pid)
    began = time.monotonic()
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(30) == 0, job.err()
    assert time.monotonic() - began < 4, "2 s, and twice that on a busy machine"
    assert all_gone(pids) and snapshot_steps(run_dir) == []
    assert job.err().count("before the first step") == 1, job.err()
    assert generations(run_dir) == []
