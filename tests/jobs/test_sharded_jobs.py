"""fsdp, and ddp with a sharded optimizer: the run of one worker, whoever holds which part of its state."""

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import (
    Start,
    all_gone,
    changed_program,
    command,
    final_hash,
    manifest,
    reached,
    snapshot_steps,
)
from support.shards import write_llmc

from mingpt.tools.jobs import Job, descendants, read_history, read_metric, torchrun

FSDP: dict[str, Any] = {"trainer__parallel": "fsdp"}
SHARDED_OPTIMIZER: dict[str, Any] = {"trainer__shard_optimizer": True}


def assert_same_run(run_dir: Path, expected: Path) -> None:
    """Weights, optimizer, what the workers were fed, and all that was measured."""
    assert final_hash(run_dir) == final_hash(expected)
    assert manifest(run_dir, 30)["audit"] == manifest(expected, 30)["audit"]
    for name in ("train/loss", "grad_norm", "val/loss", "val/bits_per_byte"):
        found = read_metric(run_dir, name)
        assert len(found) >= 4 and found == read_metric(expected, name), name


def sentence_of(job: Job) -> str:
    """With which a job ends; it is said once."""
    lines = [line for line in job.err().splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "Traceback" not in job.err(), job.err()
    return lines[0].removeprefix("error: ")


@pytest.mark.parametrize(
    ("workers", "settings"),
    [
        (2, FSDP),
        pytest.param(3, FSDP | {"trainer__recompute": "block"}, marks=pytest.mark.slow),
        pytest.param(2, FSDP | {"trainer__fsdp_reshard": False}, marks=pytest.mark.slow),
        pytest.param(3, SHARDED_OPTIMIZER, marks=pytest.mark.slow),
    ],
)
def test_a_sharded_run_is_that_of_ddp(
    workers: int, settings: dict[str, Any], start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """One and three fsdp workers, and two of the other kind, are in the next two tests as well."""
    job = start(command(launcher=torchrun(workers), run_dir=tmp_path, data__path=text, **settings))
    assert job.wait() == 0, job.err()
    assert_same_run(tmp_path, undisturbed)
    assert snapshot_steps(tmp_path) == snapshot_steps(undisturbed)
    assert "Warning" not in job.err() and "Traceback" not in job.err(), job.err()


@pytest.mark.slow
def test_strategy_and_number_of_workers_change_in_mid_run(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """One worker with all of the state, three with shards, two with shards of the optimizer, fsdp alone."""
    parts: list[tuple[int, dict[str, Any]]] = [(1, {}), (3, FSDP), (2, SHARDED_OPTIMIZER), (1, FSDP), (2, {})]
    for number, (workers, settings) in enumerate(parts):
        launcher = [sys.executable] if workers == 1 else torchrun(workers)
        settings = settings | {"run_dir": tmp_path, "data__path": text, "trainer__workers": 1}
        job = start(command(launcher=launcher, **settings))
        if number < len(parts) - 1:
            job.wait_until(reached(tmp_path, 5 * number + 3))
            (tmp_path / "STOP").touch()
        assert job.wait() == 0, job.err()
    generations = read_history(tmp_path)["generations"]
    assert [entry["workers"] for entry in generations] == [workers for workers, _ in parts]
    assert all(entry["from_step"] < entry["to_step"] for entry in generations)
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "victim"),
    [(FSDP, 0), (SHARDED_OPTIMIZER, 1)],
    ids=["fsdp-0", "ddp-1"],
)
def test_a_killed_worker_costs_no_bit(
    victim: int, settings: dict[str, Any], start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    launcher = torchrun(2, restarts=3)
    job = start(command(launcher=launcher, run_dir=tmp_path, data__path=text, **settings))
    job.wait_until(reached(tmp_path, 12))
    os.kill(job.workers()[victim], signal.SIGKILL)
    assert job.wait() == 0, job.err()
    ends = [entry["end"] for entry in read_history(tmp_path)["generations"]]
    assert ends == [f"worker {victim} vanished", "finished"]
    assert "Traceback" not in job.err() and "could not be written" not in job.err(), job.err()
    assert_same_run(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_stop_is_one_snapshot_of_all_workers(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    words = command(launcher=torchrun(2), run_dir=tmp_path, data__path=text, snapshot__every=1000, **FSDP)
    job = start(words)
    job.wait_until(reached(tmp_path, 8))
    pids = descendants(job.pid)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(30) != 0 and all_gone(pids)
    (generation,) = read_history(tmp_path)["generations"]
    assert generation["end"] == "stopped by SIGTERM"
    assert snapshot_steps(tmp_path) == [generation["to_step"]]
    resumed = start(words)
    assert resumed.wait() == 0, resumed.err()
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
    """One of them notices the request a few batches later, and forward passes are collective."""
    program = changed_program(tmp_path, STOPPED_EVALUATION)
    settings = {"run_dir": tmp_path / "run", "data__path": text, "trainer__eval_at_start": False} | FSDP
    settings |= {"trainer__timeout_s": 20, "trainer__eval_every": 4, "data__val_fraction": 0.6}
    job = start(command(launcher=torchrun(2), program=program, **settings))
    assert job.wait() != 0
    assert read_history(tmp_path / "run")["status"] == "stopped", job.err()
    assert snapshot_steps(tmp_path / "run") == [4] and not read_metric(tmp_path / "run", "val/loss")


PLANTED = """
def on_run_start(state, strategy):
    def spoil(step, micro_batch, **batch):
        if step == 12 and micro_batch == 5:
            strategy.held_weights()["wte.weight"].fill_(float("nan"))
    events.subscribe("batch", spoil)
events.subscribe("run_start", on_run_start)
"""


@pytest.mark.slow
def test_a_loss_that_is_not_finite_ends_the_job_on_all_workers(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """One worker's rows of a weight are spoiled, and the last good snapshot stays as it was."""
    program = changed_program(tmp_path, PLANTED)
    settings = {"run_dir": tmp_path / "run", "data__path": text, "snapshot__every": 4} | FSDP
    job = start(command(launcher=torchrun(2, restarts=50), program=program, **settings))
    assert job.wait() != 0
    assert job.err().count("error: step 13: the loss of micro-batch ") == 1, job.err()
    history = read_history(tmp_path / "run")
    assert history["status"] == "failed" and len(history["generations"]) == 1
    assert snapshot_steps(tmp_path / "run")[-1] == 12


@pytest.mark.slow
@pytest.mark.parametrize("part", ["train", "val"])
def test_data_that_one_worker_cannot_use_ends_the_job_on_all(part: str, start: Start, tmp_path: Path) -> None:
    """The others wait for its part of each block's weights."""
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
    job = start(command(**settings))
    assert job.wait() == 2, job.err()
    number = "2,500" if part == "train" else "250"
    expected = f"token {number} of {data}/{part}_00000.bin is 90, and the vocabulary has 90"
    assert sentence_of(job).startswith(expected)
    history = read_history(tmp_path / "run")
    assert history["status"] == "failed" and len(history["generations"]) == 1, history


@pytest.mark.slow
def test_an_evaluation_alone_is_that_of_one_worker(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(undisturbed, run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__eval_only": True} | FSDP
    job = start(command(launcher=torchrun(2), **settings))
    assert job.wait() == 0, job.err()
    assert f"val/loss {read_metric(undisturbed, 'val/loss')[30]:.4f}" in job.err()
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def sample_of(run_dir: Path) -> list[str]:
    """The lines of text in the log, which begin with four blanks."""
    lines = (run_dir / "log.txt").read_text().splitlines()
    return [line for line in lines if line.startswith("    ")]


@pytest.mark.slow
def test_weights_of_another_run_and_the_text_that_they_write_are_those_of_ddp(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """All workers generate the text together."""
    runs: dict[int, dict[str, Any]] = {1: {}, 2: FSDP}
    for workers, settings in runs.items():
        settings = settings | {"run_dir": tmp_path / str(workers), "data__path": text}
        settings |= {"trainer__sample_tokens": 60, "trainer__max_steps": 3}
        job = start(command(launcher=torchrun(workers), snapshot__init_from=undisturbed, **settings))
        assert job.wait() == 0, job.err()
    one, two = tmp_path / "1", tmp_path / "2"
    assert len("".join(sample_of(one))) > 60 and sample_of(two) == sample_of(one)
    assert read_metric(two, "val/loss") == read_metric(one, "val/loss")
    assert read_metric(one, "val/loss")[0] < read_metric(undisturbed, "val/loss")[10]
    assert final_hash(two, 3) == final_hash(one, 3)


# As in a later generation, when nodes have joined.
ANY_NUMBER = """
import mingpt.training.start
mingpt.training.start.check_workers = lambda *_: None
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FSDP, SHARDED_OPTIMIZER], ids=["fsdp", "ddp"])
def test_workers_without_micro_batches_take_part_and_change_nothing(
    settings: dict[str, Any], start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(tmp_path, ANY_NUMBER)
    settings = settings | {"data__path": text, "trainer__micro_batch_size": 4, "trainer__max_steps": 4}
    for workers in (3, 1):
        run_dir = tmp_path / str(workers)
        job = start(command(launcher=torchrun(workers), program=program, run_dir=run_dir, **settings))
        assert job.wait() == 0, job.err()
    assert final_hash(tmp_path / "3", 4) == final_hash(tmp_path / "1", 4)


@pytest.mark.slow
def test_a_narrow_type_for_weights_has_one_hash_of_its_own(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    for workers in (1, 2):
        settings = {"run_dir": tmp_path / str(workers), "data__path": text} | FSDP
        job = start(command(launcher=torchrun(workers), trainer__fsdp_param_dtype="bfloat16", **settings))
        assert job.wait() == 0, job.err()
    assert final_hash(tmp_path / "1") == final_hash(tmp_path / "2") != final_hash(undisturbed)
    ours, theirs = read_metric(tmp_path / "2", "val/loss"), read_metric(undisturbed, "val/loss")
    assert ours[30] == pytest.approx(theirs[30], abs=0.05)
