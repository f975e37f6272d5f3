"""fsdp, and ddp with a sharded optimizer, give the bits of one worker, however the state is split."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    Finish,
    Start,
    assert_same_run,
    changed_program,
    command,
    error_of,
    final_hash,
    reached,
    snapshot_steps,
)
from support.jobs import last_step, read_history, read_metric
from support.shards import write_llmc

from mingpt.tools.jobs import torchrun

FSDP: dict[str, Any] = {"trainer__parallel": "fsdp"}
SHARDED_OPTIMIZER: dict[str, Any] = {"trainer__shard_optimizer": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        pytest.param(2, FSDP, marks=pytest.mark.weekly),
        (3, FSDP | {"trainer__recompute": "block"}),
        pytest.param(2, FSDP | {"trainer__fsdp_reshard": False}, marks=pytest.mark.weekly),
        (3, SHARDED_OPTIMIZER),
    ],
)
def test_a_sharded_run_is_that_of_ddp(
    workers: int, settings: dict[str, Any], finish: Finish, undisturbed: Path, tmp_path: Path
) -> None:
    """The next test has other numbers of workers; test_memory_of_a_node.py has killed workers."""
    job = finish(launcher=torchrun(workers), run_dir=tmp_path, **settings)
    assert_same_run(tmp_path, undisturbed)
    assert snapshot_steps(tmp_path) == snapshot_steps(undisturbed)
    assert "Warning" not in job.err() and "Traceback" not in job.err(), job.err()


# A stop is obeyed a step or more later, and the next parts of the run need steps, too.
SLOW_STEPS = """
import time
events.subscribe("step_end", lambda step: time.sleep(0.1))
"""


@pytest.mark.slow
def test_strategy_and_number_of_workers_change_in_mid_run(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """Parts: one worker with the whole state, three with shards, two with optimizer shards, fsdp alone."""
    parts: list[tuple[int, dict[str, Any]]] = [(1, {}), (3, FSDP), (2, SHARDED_OPTIMIZER), (1, FSDP), (2, {})]
    own = {"run_dir": tmp_path, "data__path": text, "program": changed_program(tmp_path, SLOW_STEPS)}
    for number, (workers, settings) in enumerate(parts):
        launcher = [sys.executable] if workers == 1 else torchrun(workers)
        begun_at = last_step(tmp_path)
        job = start(command(launcher=launcher, trainer__workers=1, **own, **settings))
        if number < len(parts) - 1:
            job.wait_until(reached(tmp_path, begun_at + 2))
            (tmp_path / "STOP").touch()
        assert job.wait() == 0, job.err()
    generations = read_history(tmp_path)["generations"]
    assert [entry["workers"] for entry in generations] == [workers for workers, _ in parts]
    assert [entry["end"] for entry in generations] == ["stopped by STOP"] * 4 + ["finished"]
    assert {entry["to_step"] for entry in generations} <= set(snapshot_steps(tmp_path))
    assert_same_run(tmp_path, undisturbed)


STOPPED_EVALUATION = """
import os, signal, time
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
def test_a_stop_during_an_evaluation_ends_it_on_all_workers(start: Start, text: Path, tmp_path: Path) -> None:
    """One worker notices the request a few batches later, and forward passes are collective."""
    program = changed_program(tmp_path, STOPPED_EVALUATION)
    settings = {"run_dir": tmp_path / "run", "data__path": text, "trainer__eval_at_start": False} | FSDP
    settings |= {"trainer__timeout_s": 20, "trainer__eval_every": 4, "data__val_fraction": 0.6}
    job = start(command(launcher=torchrun(2), program=program, **settings))
    assert job.wait() != 0
    assert read_history(tmp_path / "run")["status"] == "stopped", job.err()
    assert snapshot_steps(tmp_path / "run") == [4] and not read_metric(tmp_path / "run", "val/loss")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", pytest.param("val", marks=pytest.mark.weekly)])
def test_data_that_one_worker_cannot_use_ends_the_job_on_all(part: str, start: Start, tmp_path: Path) -> None:
    """The other workers wait for that worker's part of each block's weights."""
    data = tmp_path / "data"
    data.mkdir()
    tokens = np.random.default_rng(0).integers(0, 90, 5000)
    for name, count in (("train", 5000), ("val", 500)):
        part_tokens = tokens[:count].copy()
        part_tokens[count // 2] = 90 if name == part else 0
        write_llmc(data / f"{name}_00000.bin", part_tokens)
    settings: dict[str, Any] = {
        "run_dir": tmp_path / "run",
        "data__path": data,
        "data__vocab_size": 90,
    } | FSDP
    settings |= {"trainer__eval_at_start": False, "trainer__max_steps": 200, "trainer__eval_every": 7}
    settings |= {"trainer__workers": 2, "snapshot__every": 100, "trainer__timeout_s": 20}
    error = error_of(start(command(**settings)))
    number = "2,500" if part == "train" else "250"
    expected = f"token {number} of {data}/{part}_00000.bin is 90, and the vocabulary has 90"
    assert error.startswith(expected)
    history = read_history(tmp_path / "run")
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
    runs: dict[int, dict[str, Any]] = {1: {}, 2: FSDP}
    for workers, settings in runs.items():
        settings = settings | {"trainer__sample_tokens": 60, "trainer__max_steps": 3}
        settings |= {"run_dir": tmp_path / str(workers), "snapshot__init_from": undisturbed}
        finish(launcher=torchrun(workers), **settings)
    one, two = tmp_path / "1", tmp_path / "2"
    assert len("".join(sample_of(one))) > 60 and sample_of(two) == sample_of(one)
    assert read_metric(two, "val/loss") == read_metric(one, "val/loss")
    assert read_metric(one, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]
    assert final_hash(two, 3) == final_hash(one, 3)
