"""Jobs that TensorBoard and trackers follow: killed ones, and trackers that fail, block or are absent."""

import functools
import json
import os
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, changed_program, command, final_hash, reached
from support.events import read_scalars, read_texts

from mingpt.tools.jobs import read_history, read_metric, torchrun

# A package with wandb's interface. $FAULT is what happens where: "block init", say. Notes its calls.
STAND_IN = """
import json, os, sys, threading, time
fault, place = os.environ["FAULT"].split()
def called(name, *arguments):
    if fault == "print":
        print("printed by", name)
    if fault == "slow" and name == "log":
        time.sleep(0.05)
    if name == place and fault == "block":
        threading.Event().wait()
    if name == place and fault == "raise":
        raise ValueError("planted in " + name)
    if name == place and fault == "leave":
        sys.exit("planted in " + name)
    if name == place and fault == "miss":
        raise ModuleNotFoundError("No module named 'wandb'", name="wandb")
    is_main = threading.current_thread() is threading.main_thread()
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([name, is_main, *arguments]) + "\\n")
def init(**arguments):
    called("init", arguments)
def log(values, step):
    called("log", step, values)
def finish():
    called("finish")
called("import")
"""
QUICK = ["raise log"]
SLOW = [
    "block log",
    "miss import",
    "raise init",
    "leave init",
    "raise finish",
    "block import",
    "block init",
    "block finish",
]
LINES = {
    "raise": "has failed (ValueError: planted in {place}): the run goes on without it",
    "leave": "has failed (SystemExit: planted in {place}): the run goes on without it",
    "block": "did not end within 5 s and is given up: it may lack the last values",
    "miss": "needs the package wandb, which is not installed: the run goes on without it",
}


def stand_in(folder: Path, fault: str) -> dict[str, str]:
    """The environment of a job whose package wandb is the stand-in."""
    (folder / "wandb").mkdir()
    (folder / "wandb" / "__init__.py").write_text(STAND_IN)
    return {"PYTHONPATH": str(folder), "FAULT": fault, "CALLS": str(folder / "calls.jsonl")}


def read_calls(folder: Path) -> list[list[Any]]:
    return [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]


def has_begun(run_dir: Path, generation: int) -> bool:
    return len(read_history(run_dir)["generations"]) == generation


def tracker_lines(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("report.tracker")]


@pytest.mark.slow
def test_after_two_kills_tensorboard_shows_what_metrics_jsonl_holds(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Of worker 0, which writes both. Each step once, no point behind the start of a later generation."""
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__sample_tokens": 10}
    job = start(command(launcher=torchrun(2, restarts=3), report__tensorboard=True, **settings))
    for number, step in enumerate((7, 18), 1):
        job.wait_until(functools.partial(has_begun, tmp_path, number))
        job.wait_until(reached(tmp_path, step))
        os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    assert final_hash(tmp_path) == final_hash(undisturbed)
    scalars = read_scalars(tmp_path)
    for name in ("train/loss", "val/loss", "val/bits_per_byte", "lr", "grad_norm", "tokens_per_s"):
        recorded = list(read_metric(tmp_path, name).items())
        assert [step for step, _ in scalars[name]] == [step for step, _ in recorded], name
        assert [value for _, value in scalars[name]] == pytest.approx([value for _, value in recorded])
    assert [step for step, _ in scalars["train/loss"]] == list(range(1, 31))
    generations = read_history(tmp_path)["generations"]
    marks = {entry["from_step"]: number for number, entry in enumerate(generations, 1)}
    assert scalars["generation"] == list(marks.items()) and len(generations) == 3
    texts = read_texts(tmp_path)
    assert [step for step, _ in texts["sample"]] == [0, 10, 20, 30]
    assert "worker 0 vanished at step" in texts["restart"][-1][1]
    assert "report.tensorboard" not in job.err(), job.err()


@pytest.mark.parametrize("fault", [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)])
def test_a_tracker_that_fails_blocks_or_is_absent_is_one_line(
    fault: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The bits stay as they are, and the run ends in time, in the same way."""
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 1}
    job = start(command(report__tracker="wandb", **settings), **stand_in(tmp_path, fault))
    job.wait_until(reached(tmp_path / "run", 30))
    began = time.monotonic()
    assert job.wait() == 0, job.err()
    assert time.monotonic() - began < 15
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)
    kind, place = fault.split()
    assert tracker_lines(job.err()) == [f"report.tracker=wandb {LINES[kind].format(place=place)}"]
    assert "Traceback" not in job.err() and job.out() == ""
    assert read_history(tmp_path / "run")["status"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["slow log", "print all"])
def test_a_tracker_that_is_slow_or_prints_gets_every_record_and_stdout_nothing(
    fault: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__workers": 2}
    job = start(command(report__tracker="wandb", **settings), **stand_in(tmp_path, fault))
    assert job.wait() == 0, job.err()
    assert final_hash(tmp_path / "run") == final_hash(undisturbed) and job.out() == ""
    calls = read_calls(tmp_path)
    assert not any(is_main for _, is_main, *_ in calls), "whoever trains never waits for a call"
    assert [name for name, *_ in calls if name != "log"] == ["import", "init", "finish"]
    logged = {step: values["train/loss"] for _, _, step, values in calls[2:-1] if "train/loss" in values}
    assert logged == read_metric(tmp_path / "run")
    if fault == "print all":
        assert "report.tracker=wandb: printed by init" in job.err()
    else:
        assert tracker_lines(job.err()) == []


@pytest.mark.slow
def test_trackio_shows_a_killed_run_as_one_with_each_step_once(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    pytest.importorskip("trackio", reason="the package trackio is not installed")
    run_dir = tmp_path / "tests" / "run"
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "report__tracker": "trackio"}
    launcher = torchrun(2, restarts=3)
    job = start(command(launcher=launcher, **settings), TRACKIO_DIR=str(tmp_path / "trackio"))
    job.wait_until(reached(run_dir, 12))
    os.kill(job.workers()[0], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    assert final_hash(run_dir) == final_hash(undisturbed) and job.out() == ""
    assert "skipped metric" not in job.err()
    with sqlite3.connect(tmp_path / "trackio" / "tests.db") as database:
        rows = database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id").fetchall()
    assert len({name for name, _, _ in rows}) == 1
    values = [(step, json.loads(metrics)) for _, step, metrics in rows]
    losses = [(step, known["train/loss"]) for step, known in values if "train/loss" in known]
    assert losses == list(read_metric(run_dir).items())


NAME_IMPORTS = """
def on_run_end(state):
    wanted = {"tensorboard", "wandb", "trackio"}
    found = sorted({name.split(".")[0] for name in sys.modules} & wanted)
    sys.stderr.write(f"imported: {found}\\n")
events.subscribe("run_end", on_run_end)
"""


def test_a_run_that_nobody_follows_imports_none_of_the_packages(
    start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(tmp_path, NAME_IMPORTS)
    settings: dict[str, Any] = {"trainer__max_steps": 2, "trainer__workers": 1}
    job = start(command(program=program, run_dir=tmp_path / "run", data__path=text, **settings))
    assert job.wait() == 0 and "imported: []\n" in job.err()
