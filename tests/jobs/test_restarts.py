"""Workers that are killed, fail or are stuck: the job goes on by itself, or ends for good."""

import os
import signal
import time
from pathlib import Path

import pytest
from support.jobs import (
    Begin,
    Finish,
    all_gone,
    assert_same_run,
    final_hash,
    generations,
    last_step,
    reached,
    read_history,
    snapshot_steps,
    torchrun,
    wait_until,
)
from support.snapshots import newest

from mingpt.snapshot import Store


@pytest.mark.slow
def test_no_worker_outlives_its_agent(begin: Begin, run_dir: Path) -> None:
    job = begin(launcher=torchrun(2, restarts=3), trainer__max_steps=10_000)
    job.wait_until(reached(run_dir, 3))
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
REPEATED = "3 generations failed one after the other at step 13 (worker 1 failed (OSError: planted))"


@pytest.mark.parametrize(
    ("event", "fault", "sentence", "count"),
    [
        ("backward_end", BAD_GRADIENT, "step 13: the gradient of windows 96 to 103 is not finite", 1),
        pytest.param("batch", "raise OSError('planted')", REPEATED, 4, marks=pytest.mark.slow),
    ],
)
def test_a_failure_that_would_repeat_ends_the_job(
    event: str, fault: str, sentence: str, count: int, begin: Begin, run_dir: Path
) -> None:
    """The failure is planted in one worker; many restarts are left; the last good snapshot is unchanged."""
    code, launcher = PLANTED.format(event=event, fault=fault), torchrun(2, restarts=50)
    job = begin(code=code, launcher=launcher, snapshot__every=4)
    assert job.wait() != 0 and job.err().count(f"error: {sentence}") == 1, job.err()
    history = read_history(run_dir)
    assert history["status"] == "failed" and len(history["generations"]) == count, job.err()
    last = snapshot_steps(run_dir)[-1]
    # A failure, unlike a NaN, does not wait for the snapshot that is being written.
    assert last == 12 or (count > 1 and last == 8)
    assert newest(Store(str(run_dir / "snapshots"))) == (last, {})


# The C function pause() returns only after a signal, as a CUDA call may.
STUCK = """
import ctypes
from pathlib import Path
def on_step_start(step):
    mark = Path({folder!r}) / "stuck"
    if step == 12 and os.environ["RANK"] == "0" and not mark.exists():
        mark.with_name("pid").write_text(str(os.getpid()))
        mark.with_name("pid").rename(mark)
        while True:
            ctypes.CDLL(None).pause()
events.subscribe("step_start", on_step_start)
"""


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_c_code_leaves_when_its_sibling_is_gone(
    begin: Begin, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The agent's SIGTERM alone would not end it."""
    code = STUCK.format(folder=str(tmp_path))
    job = begin(code=code, launcher=torchrun(2, restarts=1), trainer__timeout_s=300)
    job.wait_until((tmp_path / "stuck").exists)
    stuck = int((tmp_path / "stuck").read_text())
    (other,) = {*job.workers()} - {stuck}
    began = time.monotonic()
    os.kill(other, signal.SIGKILL)
    wait_until(lambda: all_gone([stuck]), timeout_s=10)
    assert time.monotonic() - began < 1.5
    assert job.wait() == 0, job.err()
    assert [entry["end"] for entry in generations(run_dir)] == ["worker 1 vanished", "finished"]
    assert final_hash(run_dir) == final_hash(undisturbed)


@pytest.mark.slow
def test_killed_workers_and_the_next_job_go_on_from_memory_and_an_orderly_end_leaves_none(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """Rank 0, which is killed, writes the whole state there. The next job has more workers, and other ones.

    Nothing is saved on disk until the end.
    """
    memory = tmp_path / "shm"
    memory.mkdir()
    settings = {"snapshot__every": 1000, "snapshot__memory_every": 2, "snapshot__memory_path": memory}
    job = begin(launcher=torchrun(2, restarts=3), trainer__parallel="fsdp", **settings)
    job.wait_until(reached(run_dir, 9))
    os.kill(job.workers()[0], signal.SIGKILL)
    job.wait_until(lambda: len(generations(run_dir)) == 2 and last_step(run_dir) >= 16)
    job.kill()
    assert "Traceback" not in job.err() and "could not be written" not in job.err(), job.err()
    assert snapshot_steps(run_dir) == []
    finish(launcher=torchrun(3), trainer__shard_optimizer=True, **settings)
    first, second, third = generations(run_dir)
    assert [first["end"], third["end"]] == ["worker 0 vanished", "finished"]
    assert second["restart"] and not third["restart"]
    for before, after in ((first, second), (second, third)):
        # One save may have been under way, and the one before left out because steps are as fast as saves.
        assert before["to_step"] - 6 <= after["from_step"] and after["from_step"] % 2 == 0
        assert after["from_step"] >= 4
    assert snapshot_steps(run_dir) == [30] and list(memory.iterdir()) == []
    assert_same_run(run_dir, undisturbed)
