"""A run's result depends neither on the number of workers nor on how the state is split: the same bits."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.jobs import free_port, last_step, read_history, read_metric
from support.shards import write_llmc
from support.small_jobs import Begin, Finish, assert_same_run, error_of, final_hash, reached, snapshot_steps

from mingpt.tools.jobs import torchrun

RUN_FILES = {"config.yaml", "run.json", "metrics.jsonl", "log.txt", "loss.png"}


@pytest.mark.parametrize("workers", [1, 3])
def test_curve_and_bits_are_the_same_for_any_number_of_workers(
    workers: int, finish: Finish, undisturbed: Path, run_dir: Path
) -> None:
    """One process, and torchrun with its default rendezvous."""
    under_torchrun = torchrun(workers, options=[f"--master_port={free_port()}"])
    job = finish(launcher=under_torchrun if workers > 1 else [sys.executable], trainer__workers=1)
    assert workers != 3 or "2 or 3 of a step's 8 micro-batches" in job.err()
    assert (run_dir / "loss.png").stat().st_size > 10_000
    assert {path.name for path in run_dir.iterdir()} >= RUN_FILES
    assert_same_run(run_dir, undisturbed)


# This allows more workers than micro-batches, as in a later generation when nodes have joined.
ANY_NUMBER = """
import mingpt.training.plan
mingpt.training.plan.check_workers = lambda *_: None
"""


@pytest.mark.slow
def test_workers_without_micro_batches_take_part_and_change_nothing(
    finish: Finish, reference: Callable[..., Path], run_dir: Path
) -> None:
    settings: dict[str, Any] = {"trainer__micro_batch_size": 4, "trainer__max_steps": 4}
    job = finish(code=ANY_NUMBER, launcher=torchrun(3), trainer__parallel="fsdp", **settings)
    assert "and 0 or 1 of a step's" in job.err()
    assert final_hash(run_dir, 4) == final_hash(reference(1, **settings), 4)


FSDP: dict[str, Any] = {"trainer__parallel": "fsdp"}
SHARDED_OPTIMIZER: dict[str, Any] = {"trainer__shard_optimizer": True}
# A stop is obeyed a step or more later, and the next parts of the run need steps, too.
SLOW_STEPS = 'import time; events.subscribe("step_end", lambda step: time.sleep(0.1))'


@pytest.mark.slow
def test_strategy_and_number_of_workers_change_in_mid_run(
    begin: Begin, undisturbed: Path, run_dir: Path
) -> None:
    """Parts: one worker with the whole state, three with shards, two with optimizer shards, fsdp alone.

    test_restarts.py has killed workers.
    """
    recomputed = FSDP | {"trainer__recompute": "block"}
    parts = [(1, {}), (3, recomputed), (2, SHARDED_OPTIMIZER), (1, FSDP), (2, {})]
    for number, (workers, settings) in enumerate(parts, start=1):
        launcher = [sys.executable] if workers == 1 else torchrun(workers)
        begun_at = last_step(run_dir)
        job = begin(code=SLOW_STEPS, launcher=launcher, trainer__workers=1, **settings)
        if number < len(parts):
            job.wait_until(reached(run_dir, begun_at + 2))
            (run_dir / "STOP").touch()
        assert job.wait() == 0 and "Warning" not in job.err(), job.err()
    ended = read_history(run_dir)["generations"]
    assert [entry["workers"] for entry in ended] == [workers for workers, _ in parts]
    assert [entry["end"] for entry in ended] == ["stopped by STOP"] * 4 + ["finished"]
    assert {entry["to_step"] for entry in ended} <= set(snapshot_steps(run_dir))
    assert_same_run(run_dir, undisturbed)


STOPPED_EVALUATION = """
import signal, time
import mingpt.training.evaluate
from mingpt.distributed import DistributedContext
mingpt.training.evaluate.MIN_BATCH_TOKENS = 1  # hundreds of batches
def on_evaluation_batch(number):
    time.sleep(0.05)
    if number == 2:
        os.kill(os.getppid(), signal.SIGTERM)
events.subscribe("evaluation_batch", on_evaluation_batch)
should_stop, calls = DistributedContext.should_stop, []
def notice_late(context):
    if not should_stop(context):
        return False
    calls.append(1)
    return context.rank == 0 or len(calls) > 3
DistributedContext.should_stop = notice_late
"""


@pytest.mark.slow
def test_a_stop_during_an_evaluation_ends_it_on_all_workers(begin: Begin, run_dir: Path) -> None:
    """One worker notices the request a few batches later, and forward passes are collective."""
    settings = {"trainer__eval_at_start": False, "trainer__eval_every": 4, "data__val_fraction": 0.6} | FSDP
    job = begin(code=STOPPED_EVALUATION, launcher=torchrun(2), trainer__timeout_s=20, **settings)
    assert job.wait() != 0
    assert read_history(run_dir)["status"] == "stopped", job.err()
    assert snapshot_steps(run_dir) == [4] and not read_metric(run_dir, "val/loss")


@pytest.mark.slow
def test_data_that_one_worker_cannot_use_ends_the_job_on_all(
    begin: Begin, run_dir: Path, tmp_path: Path
) -> None:
    """The other workers wait for that worker's part of each block's weights."""
    tokens = np.random.default_rng(0).integers(0, 90, 5000)
    write_llmc(tmp_path / "val_00000.bin", tokens[:500])
    tokens[2500] = 90
    write_llmc(tmp_path / "train_00000.bin", tokens)
    data: dict[str, Any] = {"data__path": tmp_path, "data__vocab_size": 90, "trainer__max_steps": 200} | FSDP
    error = error_of(begin(trainer__workers=2, trainer__timeout_s=20, **data))
    assert error.startswith(f"token 2,500 of {tmp_path}/train_00000.bin is 90, and the vocabulary has 90")
    history = read_history(run_dir)
    assert history["status"] == "failed" and len(history["generations"]) == 1, history


def sample_of(run_dir: Path) -> list[str]:
    """The lines of text in the log, which begin with four blanks."""
    lines = (run_dir / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("    ")]


@pytest.mark.weekly
def test_weights_of_another_run_and_the_text_that_they_write_are_those_of_ddp(
    finish: Finish, undisturbed: Path, tmp_path: Path
) -> None:
    """All workers generate the text together."""
    one, two = tmp_path / "one", tmp_path / "two"
    given = {"trainer__sample_tokens": 60, "trainer__max_steps": 3, "snapshot__init_from": undisturbed}
    finish(launcher=torchrun(1), run_dir=one, **given)
    finish(launcher=torchrun(2), run_dir=two, **given, **FSDP)
    assert len("".join(sample_of(one))) > 60 and sample_of(two) == sample_of(one)
    assert read_metric(two, "val/loss") == read_metric(one, "val/loss")
    assert final_hash(two, 3) == final_hash(one, 3)
