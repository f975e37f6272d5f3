"""Told to stop, by whatever means, at whatever moment: one snapshot, nobody left behind, and the same command goes on from that step."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Job, alive, command, descendants, final_hash, reached, records, wait_until

Start = Callable[..., Job]


def gone(pids: list[int]) -> bool:
    return not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("kind", ["SIGTERM", "SIGINT", "SIGUSR1", "STOP"])
def test_a_stop_is_one_snapshot_and_the_run_goes_on_from_that_step(kind: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 2, "run_dir": tmp_path, "data__path": text, "snapshot__every": 1000, "restarts": 0}
    job = start(command(**settings))
    wait_until(reached(tmp_path, 8), job)
    pids = descendants(job.process.pid)
    if kind == "STOP":
        (tmp_path / "STOP").touch()
    else:  # SIGTERM as a cluster sends it, to the agent; the others to a worker
        os.kill(job.process.pid if kind == "SIGTERM" else job.workers()[1], getattr(signal, kind))
    done = job.finish(20)
    told = json.loads((tmp_path / "run.json").read_text())
    assert (done.code == 0) == (kind in ("SIGUSR1", "STOP")) and gone(pids)
    assert told["status"] == "stopped" and told["generations"][0]["end"] == f"stopped by {kind}"
    stopped_at = told["generations"][0]["to_step"]
    assert 8 <= stopped_at < 30 and [path.name for path in tmp_path.glob("snapshots/step_*.json")] == [f"step_{stopped_at:08d}.json"]
    assert not (tmp_path / "STOP").exists()
    done = start(command(**settings)).finish()
    assert done.code == 0, done.err
    told = json.loads((tmp_path / "run.json").read_text())
    assert told["generations"][1]["from_step"] == stopped_at and told["steps_lost"] == 0 and told["status"] == "finished"
    assert final_hash(tmp_path) == final_hash(undisturbed) and records(tmp_path) == records(undisturbed)


def test_without_torchrun_a_stop_exits_0(start: Start, text: Path, tmp_path: Path) -> None:
    job = start(command(run_dir=tmp_path, data__path=text, trainer__max_steps=10_000))
    wait_until(reached(tmp_path, 3), job)
    os.kill(job.process.pid, signal.SIGINT)
    done = job.finish(20)
    assert done.code == 0 and "stopped by SIGINT" in done.err and "Traceback" not in done.err, done.err


def test_a_second_signal_leaves_at_once(start: Start, text: Path, tmp_path: Path) -> None:
    """The first is heard in the middle of a long evaluation, which would have to end before the stop is agreed on."""
    often: dict[str, Any] = {"trainer__eval_at_start": False, "trainer__eval_every": 1, "trainer__log_every": 1}
    job = start(command(run_dir=tmp_path, data__path="data/input.txt", trainer__max_steps=10_000, **often))
    wait_until(reached(tmp_path, 1), job)  # the record of a step comes before its evaluation
    os.kill(job.process.pid, signal.SIGTERM)
    first = time.monotonic()
    wait_until(lambda: time.monotonic() > first + 0.5, job)  # a second signal that follows at once counts as the same request
    os.kill(job.process.pid, signal.SIGTERM)
    began = time.monotonic()
    assert job.finish(20).code == 128 + signal.SIGTERM and time.monotonic() - began < 1


def test_no_worker_outlives_its_agent(start: Start, text: Path, tmp_path: Path) -> None:
    job = start(command(workers=2, restarts=3, run_dir=tmp_path, data__path=text, trainer__max_steps=10_000))
    wait_until(reached(tmp_path, 3), job)
    workers = job.workers()
    os.kill(job.process.pid, signal.SIGKILL)
    wait_until(lambda: gone(workers), timeout=1)


PLANTED = """
import sys
sys.argv[0] = "train.py"
sys.path.insert(0, ".")
import train
from mingpt.trainer import Trainer
real = Trainer.accumulate
def accumulate(self, micro_batch, inputs, targets):
    if self.steps == 12 and micro_batch == 5:
        {fault}
    real(self, micro_batch, inputs, targets)
Trainer.accumulate = accumulate
train.main()
"""


@pytest.mark.parametrize(("fault", "sentence", "generations"), [
    ("self.losses.fill_(0); self.scale = float('nan')", "step 13: the gradient of windows 96 to 103 is not finite", 1),
    ("import torch; torch.nn.init.constant_(self.model.wte.weight, float('nan'))", "step 13: the loss of micro-batch 5 (windows at ", 1),
    ("raise OSError('planted')", "3 generations failed one after the other at step 13 (worker 1 failed (OSError: planted))", 4),
])  # fmt: skip
def test_a_failure_that_would_repeat_ends_the_job(fault: str, sentence: str, generations: int, start: Start, text: Path, tmp_path: Path) -> None:
    """Planted in one worker; many restarts are left; the last good snapshot stays as it was."""
    (tmp_path / "planted_train.py").write_text(PLANTED.format(fault=fault))
    words = command(workers=2, restarts=50, run_dir=tmp_path / "run", data__path=text, snapshot__every=4)
    done = start([str(tmp_path / "planted_train.py") if word == "train.py" else word for word in words]).finish()
    told = json.loads((tmp_path / "run" / "run.json").read_text())
    assert done.code != 0 and done.err.count(f"error: {sentence}") == 1, done.err
    assert told["status"] == "failed" and len(told["generations"]) == generations, done.err
    last = max(int(path.stem[5:]) for path in (tmp_path / "run").glob("snapshots/step_*.json"))
    assert last == 12 or (generations > 1 and last == 8)  # a failure, unlike a NaN, does not wait for the snapshot on its way
    from mingpt.snapshot import Folder

    snapshot, wrong = Folder(str(tmp_path / "run" / "snapshots")).newest()
    assert snapshot and not wrong and snapshot.manifest["step"] == last
    if generations == 1:
        return
    mended = start(command(run_dir=tmp_path / "run", data__path=text, snapshot__every=4)).finish()
    assert mended.code == 0 and json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished", mended.err


def test_a_frozen_worker_is_given_up_and_the_job_goes_on(start: Start, text: Path, undisturbed: Path, tmp_path: Path) -> None:
    """Well before the 30 s that the agent would give a process which cannot take its SIGTERM."""
    job = start(command(workers=3, restarts=1, run_dir=tmp_path, data__path=text, trainer__timeout_s=4))
    wait_until(reached(tmp_path, 12), job)
    began = time.monotonic()
    os.kill(job.workers()[1], signal.SIGSTOP)
    done = job.finish()
    assert done.code == 0, done.err
    assert time.monotonic() - began < 25
    assert "worker 1 kept silent for 4 s at step" in done.err
    assert final_hash(tmp_path) == final_hash(undisturbed)
