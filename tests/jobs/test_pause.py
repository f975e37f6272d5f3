"""`trainer.pause_after`: the job stops after its time, restarts included, and the same command goes on."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, assert_same_run, changed_program, command, reached, snapshot_steps
from support.jobs import read_history

from mingpt.tools.jobs import torchrun

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
