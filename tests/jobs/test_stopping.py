"""A stop, by whatever means: one snapshot, no process left, and the same command goes on from there."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from support.jobs import descendants, read_history, read_metric, wait_until
from support.small_jobs import (
    Begin,
    Finish,
    all_gone,
    assert_same_run,
    contents,
    final_hash,
    generations,
    reached,
    snapshot_steps,
)

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
    kind: str, launcher: list[str], begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    settings = {"snapshot__every": 1000, "launcher": launcher, "trainer__workers": 2}
    job = begin(**settings)
    job.wait_until(reached(run_dir, 8))
    pids = descendants(job.pid)
    if kind == "STOP":
        (run_dir / "STOP").touch()
    else:  # a cluster and a terminal signal the agent; SIGUSR1 goes to a worker
        os.kill(job.workers()[1] if kind == "SIGUSR1" else job.pid, getattr(signal, kind))
    code = job.wait(30)
    assert (code == 0) == (kind != "SIGTERM") and all_gone(pids), job.err()
    assert launcher == TORCHRUN or "Traceback" not in job.err()
    (stopped,) = generations(run_dir)
    assert read_history(run_dir)["status"] == "stopped" and stopped["end"] == f"stopped by {kind}"
    assert 8 <= stopped["to_step"] < 30 and snapshot_steps(run_dir) == [stopped["to_step"]]
    assert not (run_dir / "STOP").exists()
    finish(**settings)
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
    assert len(job.workers()) == (0 if workers == 1 else workers)
    os.kill(job.pid, kind)
    # Any sooner, both signals would count as one request.
    job.wait_until(lambda: time.monotonic() > began + REPEAT_S + 0.5)
    os.kill(job.pid, kind)
    assert job.wait(30) == (128 + kind if workers == 1 else 1)
    wait_until(lambda: all_gone(pids), timeout_s=10)
    assert read_history(run_dir)["status"] == "running" and snapshot_steps(run_dir) == []
    assert "Traceback" not in job.err(), job.err()


@pytest.mark.slow
def test_an_evaluation_alone_is_stopped_by_the_first_signal(
    begin: Begin, copied: Path, tmp_path: Path
) -> None:
    """No step follows after which the workers could agree to stop."""
    snapshots = contents(copied / "snapshots")
    code = LONG_EVALUATION.format(mark=str(tmp_path / "mark"))
    job = begin(code=code, trainer__workers=1, trainer__eval_only=True)
    job.wait_until((tmp_path / "mark").exists)
    os.kill(job.pid, signal.SIGINT)
    assert job.wait(15) == 0, job.err()
    assert contents(copied / "snapshots") == snapshots


@pytest.mark.slow
def test_a_long_sample_is_cut_too(begin: Begin, run_dir: Path) -> None:
    job = begin(trainer__workers=2, trainer__eval_at_start=False, trainer__sample_tokens=1_000_000)
    job.wait_until(reached(run_dir, 10))
    began = time.monotonic()
    (run_dir / "STOP").touch()
    assert job.wait(30) == 0 and time.monotonic() - began < 4, job.err()
    assert snapshot_steps(run_dir)[-1] == 10 and read_metric(run_dir, "val/loss") == {}


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


# The start takes a minute, in a restart if the worker has died in the first generation.
SLOW = """
import time
from pathlib import Path
import mingpt.training.run, mingpt.training.trainer
def take_long(*arguments, **options):
    Path({mark!r}).touch()
    time.sleep(60)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == {generation!r}:
    {function} = take_long
def die(step):
    if step == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
events.subscribe("step_start", die)
"""
LOADING, BUILDING = "mingpt.training.facts.open_data", "mingpt.training.run.can_compile_block"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (LOADING, "SIGINT"),
        pytest.param(LOADING, "STOP", marks=pytest.mark.slow),
        pytest.param(BUILDING, "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_stop_during_the_start_is_obeyed_at_once(
    function: str, kind: str, begin: Begin, run_dir: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    code = SLOW.format(mark=str(mark), function=function, generation="0")
    job = begin(code=code, trainer__workers=2, trainer__compile=True)
    job.wait_until(mark.exists)
    pids = descendants(job.pid)
    began = time.monotonic()
    if kind == "STOP":
        run_dir.mkdir(exist_ok=True)
        (run_dir / "STOP").touch()
    else:
        os.kill(job.pid if kind == "SIGINT" else job.workers()[1], getattr(signal, kind))
    assert job.wait(30) == 0, job.err()
    assert time.monotonic() - began < 4, "2 s, and twice that on a busy machine"
    assert all_gone(pids) and not (run_dir / "STOP").exists() and snapshot_steps(run_dir) == []
    assert job.err().count("before the first step") == 1, job.err()
    assert generations(run_dir) == []


@pytest.mark.slow
def test_a_stop_while_a_restart_begins_is_noted_and_the_run_goes_on_later(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    code = SLOW.format(mark=str(mark), function=LOADING, generation="1")
    job = begin(code=code, launcher=torchrun(2, restarts=3))
    job.wait_until(mark.exists)
    (run_dir / "STOP").touch()
    assert job.wait(30) == 0, job.err()
    assert read_history(run_dir)["status"] == "stopped"
    finish(trainer__workers=1)
    assert final_hash(run_dir) == final_hash(undisturbed)
