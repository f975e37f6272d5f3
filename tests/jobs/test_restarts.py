"""Workers that are killed, fail or freeze: the job goes on by itself with the same bits, or ends for good."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    Finish,
    Start,
    all_gone,
    changed_program,
    command,
    final_hash,
    manifest,
    reached,
    snapshot_steps,
    wait_until,
)
from support.jobs import read_history, read_metric
from support.snapshots import newest

from mingpt.snapshot import Store
from mingpt.tools.jobs import torchrun


def test_no_worker_outlives_its_agent(start: Start, text: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"run_dir": tmp_path, "data__path": text, "trainer__max_steps": 10_000}
    job = start(command(launcher=torchrun(2, restarts=3), **settings))
    job.wait_until(reached(tmp_path, 3))
    workers = job.workers()
    assert len(workers) == 2
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(workers), timeout_s=10)


PLANTED = """
import torch
def on_run_start(state, strategy):
    def spoil(step, micro_batch, **batch):
        if step == 12 and micro_batch == 5:
            {fault}
    events.subscribe("{event}", spoil)
events.subscribe("run_start", on_run_start)
"""
BAD_GRADIENT = "next(state.model.parameters()).grad.fill_(float('nan'))"
# The gradients of micro-batch 5 in steps 12 and 13 are not finite, on any worker and under any strategy. If
# there are restarts, a worker is killed in between.
NOT_FINITE = """
import os, signal
def on_step_end(step):
    if step == 13 and os.environ["TORCHELASTIC_MAX_RESTARTS"] > os.environ["TORCHELASTIC_RESTART_COUNT"]:
        os.kill(os.getpid(), signal.SIGKILL)
events.subscribe("step_end", on_step_end)
def on_run_start(state, strategy):
    now = []
    def on_batch(step, micro_batch, **batch):
        now[:] = [step, micro_batch]
    events.subscribe("batch", on_batch)
    def on_output(module, inputs, output):
        if now in ([12, 5], [13, 5]) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("nan"))
    state.model.h[0].register_forward_hook(on_output)
events.subscribe("run_start", on_run_start)
"""
REPEATED = "3 generations failed one after the other at step 13 (worker 1 failed (OSError: planted))"


@pytest.mark.slow
def test_updates_that_are_skipped_are_the_same_for_any_number_of_workers_and_after_a_kill(
    start: Start, finish: Finish, text: Path, tmp_path: Path
) -> None:
    program, hashes = changed_program(tmp_path, NOT_FINITE), set()
    settings: dict[str, Any] = {"program": program, "trainer__on_nonfinite": "skip"}
    fsdp, sharded = {"trainer__parallel": "fsdp"}, {"trainer__shard_optimizer": True}
    cases: list[tuple[int, int, dict[str, Any]]] = [(1, 0, {}), (3, 0, fsdp), (2, 1, sharded)]
    for workers, restarts, more in cases:
        run_dir = tmp_path / f"run-{workers}-{restarts}"
        done = finish(launcher=torchrun(workers, restarts), run_dir=run_dir, **settings, **more)
        assert "step 13: the gradient of windows 96 to 103 is not finite; its update is left" in done.err()
        skipped = read_metric(run_dir, "skipped/first_window")
        assert skipped == {13: 96, 14: 104}
        assert read_history(run_dir)["updates_skipped"] == manifest(run_dir, 30)["skipped"][0] == 2
        hashes.add(final_hash(run_dir))
    assert len(hashes) == 1


@pytest.mark.parametrize(
    ("event", "fault", "sentence", "generations"),
    [
        ("backward_end", BAD_GRADIENT, "step 13: the gradient of windows 96 to 103 is not finite", 1),
        pytest.param("batch", "raise OSError('planted')", REPEATED, 4, marks=pytest.mark.slow),
    ],
)
def test_a_failure_that_would_repeat_ends_the_job(
    event: str,
    fault: str,
    sentence: str,
    generations: int,
    start: Start,
    finish: Finish,
    text: Path,
    tmp_path: Path,
) -> None:
    """The failure is planted in one worker; many restarts are left; the last good snapshot is unchanged."""
    program = changed_program(tmp_path, PLANTED.format(event=event, fault=fault))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "snapshot__every": 4}
    job = start(command(launcher=torchrun(2, restarts=50), program=program, **settings))
    assert job.wait() != 0 and job.err().count(f"error: {sentence}") == 1, job.err()
    history = read_history(tmp_path / "run")
    assert history["status"] == "failed" and len(history["generations"]) == generations, job.err()
    last = snapshot_steps(tmp_path / "run")[-1]
    # A failure, unlike a NaN, does not wait for the snapshot that is being written.
    assert last == 12 or (generations > 1 and last == 8)
    assert newest(Store(str(tmp_path / "run" / "snapshots"))) == (last, {})
    if generations > 1:
        finish(trainer__workers=1, **settings)
        assert read_history(tmp_path / "run")["status"] == "finished"
