"""Whole jobs on CUDA and NCCL: all host code runs as on GPUs, over a stand-in that computes on the CPU.

After each job its records are read: no forbidden call while a stream captured, no collective that differs
between ranks, no stream that used memory without waiting for the stream that wrote or read it.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.cuda.run import Record, build, environment, read_records
from support.jobs import (
    ROOT,
    Begin,
    Job,
    Start,
    all_gone,
    command,
    final_hash,
    manifest,
    reached,
    read_history,
    read_metric,
    wait_until,
)
from support.shards import write_nanogpt

pytestmark = [
    pytest.mark.weekly,
    pytest.mark.skipif(
        torch.version.cuda is None or shutil.which("g++") is None or torch.cuda.is_available(),
        reason="needs torch built for CUDA, g++ and no GPU",
    ),
]
TIMEOUT_S, STEPS = 10, 6
SETTINGS: dict[str, Any] = {
    "trainer__device": "auto",
    "trainer__compile": False,
    "trainer__timeout_s": TIMEOUT_S,
    "trainer__max_steps": STEPS,
    "trainer__eval_every": STEPS,
    "trainer__eval_windows": 4,
    "trainer__replay_every": 3,
    "snapshot__every": STEPS,
    "snapshot__memory_every": 1,
    "trainer__micro_batch_size": 2,
    "model__n_layer": 1,
    "data__block_size": 16,
}


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("standin")
    build(folder)
    return folder


@pytest.fixture(scope="session")
def one_worker(libraries: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one-worker")
    words = command(run_dir=folder / "run", data__path=text, **SETTINGS)
    job = Job(words, folder / "job", cwd=ROOT, **environment(libraries, folder))
    assert job.wait() == 0, job.err()
    return folder / "run"


@pytest.fixture
def on_gpus(begin: Begin, start: Start, libraries: Path, tmp_path: Path) -> Iterator[Begin]:
    """A function that starts a job, or the command `words`, on so many GPUs, as `begin` does."""

    def begin_job(*words: str, gpus: int = 2, env: Mapping[str, str] | None = None, **settings: Any) -> Job:
        pretended = environment(libraries, tmp_path, gpus) | dict(env or {})
        return start(words, **pretended) if words else begin(env=pretended, **SETTINGS | settings)

    yield begin_job
    assert not of_kind(read_records(tmp_path), "FORBIDDEN", "MISMATCH", "HAZARD")


def of_kind(records: list[Record], *kinds: str) -> list[Record]:
    return [record for record in records if record.kind in kinds]


def finished(job: Job, folder: Path) -> list[Record]:
    """Wait for a job that nothing disturbs, and return its records. Its ranks call the same collectives."""
    assert job.wait(200) == 0, job.err()
    records = read_records(folder)
    assert len(set(Counter(record.pid for record in of_kind(records, "COLLECTIVE")).values())) <= 1
    return records


STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "fsdp": {"trainer__parallel": "fsdp"},
    "shard_optimizer": {"trainer__shard_optimizer": True},
    "hook": {"trainer__reduction": "fast", "trainer__replay_every": 0},
}
SMALL_BUCKETS_AND_HOOK = f"""
sys.path.insert(0, {str(ROOT / "tests")!r})
from support import hooked_ddp
hooked_ddp.ddp.BUCKET_BYTES = 4096
hooked_ddp.STRATEGIES["ddp", "fast"] = hooked_ddp.HookedDDP
"""


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("parallel", STRATEGIES)
def test_strategies_and_numbers_of_workers_have_one_hash(
    parallel: str, workers: int, on_gpus: Begin, one_worker: Path, tmp_path: Path
) -> None:
    """In the case `hook`, DDP has ExactHook in place of its own all-reduce."""
    job = on_gpus(gpus=4, trainer__workers=workers, code=SMALL_BUCKETS_AND_HOOK, **STRATEGIES[parallel])
    allocations = [r for r in of_kind(finished(job, tmp_path), "ALLOCATION") if "device" in r.what]
    assert final_hash(tmp_path / "run", STEPS) == final_hash(one_worker, STEPS)
    assert read_metric(tmp_path / "run", "val/loss") == read_metric(one_worker, "val/loss")
    cards = {(record.pid, record.what.split()[-1]) for record in allocations}
    assert sorted(card for _, card in cards) == [str(rank) for rank in range(workers)]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_fast_reduction_learns_the_same(
    parallel: str, on_gpus: Begin, one_worker: Path, tmp_path: Path
) -> None:
    finished(on_gpus(trainer__workers=2, trainer__reduction="fast", trainer__parallel=parallel), tmp_path)
    expected = read_metric(one_worker)
    assert read_metric(tmp_path / "run") == pytest.approx(expected, rel=2e-3) and len(expected) == STEPS


def test_gpt2_learns_on_a_card_without_bfloat16_with_its_loss_in_chunks(
    on_gpus: Begin, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"model__arch": "gpt2", "optimizer__name": "adamw", "model__dropout": 0.1}
    settings["code"] = "import mingpt.model.operations as it\nit.MAX_LOGITS = 64"
    finished(on_gpus(env={"STANDIN_CAPABILITY": "7.5"}, trainer__workers=2, **settings), tmp_path)
    losses = list(read_metric(tmp_path / "run").values())
    assert losses[-1] < losses[0]
    assert manifest(tmp_path / "run", STEPS)["loss_scale"] == {"scale": 65_536, "good_steps": STEPS}
    gpu = read_history(tmp_path / "run")["gpu"]
    assert (gpu["card"], gpu["compute capability"], gpu["memory"]) == ("CUDA stand-in", "7.5", "80.0 GiB")


@pytest.mark.parametrize("kind", ["text", "shards"])
def test_a_step_waits_for_the_gpu_twice_and_a_save_to_memory_at_most_twice(
    kind: str, on_gpus: Begin, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"trainer__workers": 2, "trainer__replay_every": 0, "trainer__eval_windows": 1}
    if kind == "shards":
        for name, count in (("train", 5000), ("val", 500)):
            write_nanogpt(tmp_path / f"{name}.bin", np.random.default_rng(0).integers(0, 90, count))
        settings |= {"data__path": tmp_path, "data__vocab_size": 90}
    steps = 2 * STEPS
    records = finished(on_gpus(trainer__max_steps=steps, trainer__eval_every=steps, **settings), tmp_path)
    waits = Counter((record.pid, record.place) for record in of_kind(records, "WAIT"))
    often = {key: count // steps for key, count in waits.items() if count >= steps}
    for pid in {pid for pid, _ in often}:
        in_save = sum(count for (one, place), count in often.items() if one == pid and "snapshot/" in place)
        in_step = sum(count for (one, _), count in often.items() if one == pid) - in_save
        assert in_step == 2 and in_save <= 2, often


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_no_bit(
    number: signal.Signals, on_gpus: Begin, one_worker: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = on_gpus(trainer__workers=2)
    job.wait_until(reached(run_dir, 2))
    victim, *others = job.workers()[::-1]
    os.kill(victim, number)
    began = time.monotonic()
    wait_until(lambda: all_gone(others))
    assert time.monotonic() - began < TIMEOUT_S + 4
    assert job.wait() == 0, job.err()
    assert final_hash(run_dir, STEPS) == final_hash(one_worker, STEPS)
    assert [entry["from_step"] > 0 for entry in read_history(run_dir)["generations"]] == [False, True]
    assert "SIGABRT" not in job.err()


def test_a_stop_is_resumed_by_another_number_of_workers(
    on_gpus: Begin, one_worker: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = on_gpus(trainer__workers=2)
    job.wait_until(reached(run_dir, 2))
    (run_dir / "STOP").touch()
    assert job.wait() == 0, job.err()
    assert read_history(run_dir)["status"] == "stopped"
    assert on_gpus(gpus=3, trainer__workers=3).wait() == 0
    assert final_hash(run_dir, STEPS) == final_hash(one_worker, STEPS)


# Worker 1 changes a weight after step 2, as a GPU with bad memory would.
FLIP = """
def on_run_start(state, strategy):
    def flip(step):
        if step == 2 and os.environ["RANK"] == "1":
            next(state.model.parameters()).data.view(-1)[0].add_(1)
    events.subscribe("optimizer_end", flip)
events.subscribe("run_start", on_run_start)
"""


def test_a_copy_that_differs_ends_the_job(on_gpus: Begin) -> None:
    job = on_gpus(trainer__workers=2, code=FLIP)
    assert job.wait() != 0 and "holds a different copy of model.wte.weight" in job.err(), job.err()


def test_evaluation_and_samples_of_a_snapshot_are_those_of_its_run(
    on_gpus: Begin, one_worker: Path, tmp_path: Path
) -> None:
    shutil.copytree(one_worker, tmp_path / "run")
    assert on_gpus(trainer__eval_only=True).wait() == 0
    assert read_metric(tmp_path / "run", "val/loss") == read_metric(one_worker, "val/loss")
    words = ["sample.py", str(one_worker), "--prompt", "O", "--tokens", "20", "--dtype", "float32"]
    job = on_gpus(sys.executable, *words, "--device", "cuda")
    on_cpu = subprocess.run([sys.executable, *words, "--device", "cpu"], cwd=ROOT, capture_output=True)
    assert job.wait() == 0 and job.out() == on_cpu.stdout.decode() != ""


def test_a_failure_of_nccl_is_told_in_its_own_words_and_costs_no_restart(
    on_gpus: Begin, tmp_path: Path
) -> None:
    reason = "Error while creating shared memory segment /dev/shm/nccl-x (size 9637888)"
    job = on_gpus(trainer__workers=2, env={"STANDIN_NCCL_FAIL": reason})
    assert job.wait() not in (0, -signal.SIGABRT) and job.err().count(reason) == 1, job.err()
    assert "restart" not in job.err()


def test_the_parts_of_the_gpu_benchmark_run_and_no_figure_passes_for_a_gpus(
    start: Start, libraries: Path, tmp_path: Path
) -> None:
    words = [sys.executable, "benchmarks/gpu.py", "--minutes", "60", "--out", str(tmp_path / "results")]
    job = start(words, **environment(libraries, tmp_path, gpus=2))
    assert job.wait(1800) == 0, job.err()
    rows = [json.loads(line) for line in job.out().splitlines() if line.startswith("{")]
    parts = {"machine", "tests", "speed", "recovery", "nanogpt", "large", "snapshots", "sampling"}
    assert {row["part"] for row in rows} == parts and {row["on"] for row in rows} == {"stand-in"}
    assert {row.get("tokens_per_s", "-") for row in rows} == {"-"} and not (tmp_path / "results").exists()
