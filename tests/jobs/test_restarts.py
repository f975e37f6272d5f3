"""Workers that are killed, fail, freeze or are stuck: the job goes on by itself, or ends for good."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from support.jobs import last_step, read_history, read_metric, wait_until
from support.small_jobs import (
    Begin,
    Finish,
    all_gone,
    assert_same_run,
    final_hash,
    generations,
    manifest,
    reached,
    snapshot_steps,
)
from support.snapshots import newest

from mingpt.snapshot import Store
from mingpt.tools.jobs import torchrun


@pytest.mark.slow
def test_no_worker_outlives_its_agent(begin: Begin, run_dir: Path) -> None:
    job = begin(launcher=torchrun(2, restarts=3), trainer__max_steps=10_000)
    job.wait_until(reached(run_dir, 3))
    workers = job.workers()
    assert len(workers) == 2
    os.kill(job.pid, signal.SIGKILL)
    wait_until(lambda: all_gone(workers), timeout_s=10)


# The gradients of micro-batch 5 in steps 12 and 13 are not finite, on any worker and under any strategy. If
# there are restarts, a worker is killed in between.
NOT_FINITE = """
import signal
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


@pytest.mark.slow
def test_updates_that_are_skipped_are_the_same_for_any_number_of_workers_and_after_a_kill(
    finish: Finish, tmp_path: Path
) -> None:
    hashes, fsdp, sharded = set(), {"trainer__parallel": "fsdp"}, {"trainer__shard_optimizer": True}
    cases: list[tuple[int, int, dict[str, Any]]] = [(1, 0, {}), (3, 0, fsdp), (2, 1, sharded)]
    for workers, restarts, more in cases:
        run_dir, given = tmp_path / str(workers), more | {"trainer__on_nonfinite": "skip"}
        launcher = torchrun(workers, restarts)
        done = finish(launcher=launcher, code=NOT_FINITE, run_dir=run_dir, **given)
        assert "step 13: the gradient of windows 96 to 103 is not finite; its update is left" in done.err()
        assert read_metric(run_dir, "skipped/first_window") == {13: 96, 14: 104}
        assert read_history(run_dir)["updates_skipped"] == 2
        assert manifest(run_dir, 30)["skipped"][0] == 2
        hashes.add(final_hash(run_dir))
    assert len(hashes) == 1


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


# The C function pause() returns only after a signal, as a CUDA call may; LIBRARY decides who holds the GIL.
STUCK = """
import ctypes
from pathlib import Path
def on_step_start(step):
    mark = Path({folder!r}) / "stuck"
    if step == 12 and os.environ["RANK"] == {rank!r} and not mark.exists():
        mark.with_name("pid").write_text(str(os.getpid()))
        mark.with_name("pid").rename(mark)
        while True:
            ctypes.LIBRARY(None).pause()
events.subscribe("step_start", on_step_start)
"""


@pytest.mark.slow
def test_a_worker_that_is_stuck_in_c_code_leaves_when_its_sibling_is_gone(
    begin: Begin, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The agent's SIGTERM alone would not end it."""
    code = STUCK.format(folder=str(tmp_path), rank="0").replace("LIBRARY", "CDLL")
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
def test_the_place_where_a_worker_is_stuck_is_told(finish: Finish, run_dir: Path, tmp_path: Path) -> None:
    """The place is logged even though the C code holds the GIL."""
    code = STUCK.format(folder=str(tmp_path), rank="1").replace("LIBRARY", "PyDLL")
    job = finish(code=code, launcher=torchrun(2, restarts=1), trainer__timeout_s=4)
    line = (tmp_path / "changed_train.py").read_text().partition("PyDLL")[0].count("\n") + 1
    place = f"changed_train.py:{line} in on_step_start"
    assert f"worker 1 did not answer for 4 s: {place} at step 12; resumed from" in job.err()
    assert len(list((run_dir / "stacks").iterdir())) == 2, "the second generation was undisturbed"


# Rank 0 answers the first of two ranks, then freezes. The second rank, which comes later, is not to blame.
FREEZES_HALF_WAY = """
import time
from pathlib import Path
import torch.distributed as dist
mark = Path({folder!r}) / "frozen"
class Store(dist.TCPStore):
    def set(self, key, value):
        super().set(key, value)
        if key.startswith("answer/") and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), 19)
if os.environ.get("RANK") == "0":
    dist.TCPStore = Store
if os.environ.get("RANK") == "2":
    time.sleep(1.0)
"""


@pytest.mark.slow
def test_a_worker_frozen_before_the_meeting_is_given_up(
    begin: Begin, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The others wait for timeout_s or three starts, and not 30 s longer, until the agent would kill it."""
    code = FREEZES_HALF_WAY.format(folder=str(tmp_path))
    job = begin(code=code, launcher=torchrun(3, restarts=1), trainer__timeout_s=4)
    pid = job.wait_until(lambda: (tmp_path / "frozen").exists() and (tmp_path / "frozen").read_text())
    began = time.monotonic()
    job.wait_until(lambda: all_gone([int(pid)]))
    gone_s = time.monotonic() - began
    assert job.wait() == 0, job.err()
    named = re.search(r"worker 0 did not reach the rendezvous within ([\d.]+) s", job.err())
    assert named, job.err()
    assert gone_s < float(named[1]) + 10, "30 s more is what the agent waits before SIGKILL"
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
