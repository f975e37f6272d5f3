"""A stop, by whatever means: one snapshot, no process left, and the same command goes on from there."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    ROOT,
    Finish,
    Start,
    all_gone,
    assert_same_run,
    changed_program,
    command,
    final_hash,
    manifest,
    reached,
    snapshot_steps,
    wait_until,
)
from support.jobs import Job, descendants, read_history, read_metric

from mingpt.distributed.signals import REPEAT_S
from mingpt.tools.jobs import torchrun


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["SIGTERM", *(pytest.param(kind, marks=pytest.mark.weekly) for kind in ("SIGUSR1", "STOP"))]
)
def test_a_stop_is_one_snapshot_and_the_run_goes_on_from_that_step(
    kind: str, start: Start, finish: Finish, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "snapshot__every": 1000}
    job = start(command(launcher=torchrun(2), **settings))
    job.wait_until(reached(tmp_path, 8))
    pids = descendants(job.pid)
    if kind == "STOP":
        (tmp_path / "STOP").touch()
    else:  # a cluster sends SIGTERM to the agent; other signals go to a worker
        os.kill(job.pid if kind == "SIGTERM" else job.workers()[1], getattr(signal, kind))
    code = job.wait(30)
    assert (code == 0) == (kind in ("SIGUSR1", "STOP")) and all_gone(pids)
    history = read_history(tmp_path)
    (generation,) = history["generations"]
    stopped_at = generation["to_step"]
    assert history["status"] == "stopped" and generation["end"] == f"stopped by {kind}"
    assert 8 <= stopped_at < 30 and snapshot_steps(tmp_path) == [stopped_at]
    assert not (tmp_path / "STOP").exists()
    finish(launcher=torchrun(2), **settings)
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


SLOW_BATCHES = """
import time
from pathlib import Path
mark = Path({mark!r})
steps = []
events.subscribe("evaluation_start", lambda step: steps.append(step))
def on_batch(number):
    if steps[-1] == {step} and not mark.with_suffix(".done").exists():
        mark.touch()
        time.sleep(0.3)
events.subscribe("evaluation_batch", on_batch)
"""


@pytest.fixture(scope="session")
def long_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text whose validation part, half of it, has 37 batches."""
    path = tmp_path_factory.mktemp("long_text") / "play.txt"
    path.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:300_000])
    return path


def long_evaluations(text: Path) -> dict[str, Any]:
    return {"data__path": text, "data__val_fraction": 0.5, "trainer__sample_tokens": 5}


@pytest.fixture(scope="session")
def whole(long_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one worker whose evaluations are not cut short."""
    folder = tmp_path_factory.mktemp("whole")
    settings = long_evaluations(long_text) | {"trainer__workers": 1}
    job = Job(command(run_dir=folder / "run", **settings), folder / "job", cwd=ROOT)
    assert job.wait() == 0, job.err()
    return folder / "run"


@pytest.mark.weekly
@pytest.mark.parametrize(("kind", "step", "workers"), [("STOP", 30, 2), ("SIGINT", 0, 2), ("SIGTERM", 10, 1)])
def test_an_evaluation_that_was_cut_is_done_first_on_resume(
    kind: str,
    step: int,
    workers: int,
    start: Start,
    finish: Finish,
    long_text: Path,
    whole: Path,
    tmp_path: Path,
) -> None:
    """The records end like those of an undisturbed run, in the same order."""
    settings = long_evaluations(long_text) | {"trainer__workers": workers}
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    program = changed_program(tmp_path, SLOW_BATCHES.format(mark=str(mark), step=step))
    job = start(command(program=program, run_dir=run_dir, **settings))
    job.wait_until(mark.exists)
    began, pids = time.monotonic(), descendants(job.pid)
    if kind == "STOP":
        (run_dir / "STOP").touch()
    else:
        os.kill(job.pid, getattr(signal, kind))
    assert job.wait(30) == 0 and all_gone(pids), job.err()
    assert time.monotonic() - began < 4, "2 s, and twice that on a busy machine"
    history = read_history(run_dir)
    assert history["status"] == "stopped" and history["generations"][-1]["end"] == f"stopped by {kind}"
    assert snapshot_steps(run_dir)[-1] == step and step not in read_metric(run_dir, "val/loss")
    mark.with_suffix(".done").touch()
    resumed = finish(program=program, run_dir=run_dir, **settings)
    assert "nothing is left" not in resumed.err()
    assert read_history(run_dir)["status"] == "finished"
    assert final_hash(run_dir) == final_hash(whole)
    assert values(run_dir) == values(whole)
    assert manifest(run_dir, 30)["metrics"]["val"]["step"] == 30
    assert "nothing is left to do" in finish(run_dir=run_dir, **settings).err()


def values(run_dir: Path) -> list[dict[str, Any]]:
    """The records in order, without measured times."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key[-2:] != "_s"} for record in records]


@pytest.mark.slow
def test_a_long_sample_is_cut_too(start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__sample_tokens": 1_000_000}
    job = start(command(trainer__workers=2, trainer__eval_at_start=False, **settings))
    job.wait_until(reached(tmp_path, 10))
    began = time.monotonic()
    (tmp_path / "STOP").touch()
    assert job.wait(30) == 0 and time.monotonic() - began < 4, job.err()
    assert snapshot_steps(tmp_path)[-1] == 10 and read_metric(tmp_path, "val/loss") == {}
