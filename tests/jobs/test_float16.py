"""Runs in float16: the loss scale is part of the state, the same for all workers, and survives kills."""

import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, changed_program, final_hash, manifest
from support.jobs import read_history, read_metric

from mingpt.tools.jobs import torchrun

FLOAT16: dict[str, Any] = {"trainer__dtype": "float16", "trainer__log_every": 1}
# In the first generation, the last worker overflows in step 13, and dies after step 17.
OVERFLOW_AND_KILL = """
import os, signal
overflows = [False]
def on_batch(step, micro_batch, **batch):
    overflows[:] = [(step, micro_batch) == (12, 7)]
events.subscribe("batch", on_batch)
def on_run_start(state, strategy):
    def on_output(module, inputs, output):
        if overflows[0] and output.requires_grad:
            output.register_hook(lambda gradient: gradient * float("inf"))
    state.model.h[0].register_forward_hook(on_output)
events.subscribe("run_start", on_run_start)
def on_step_end(step):
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if step == 17 and is_first and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        os.kill(os.getpid(), signal.SIGKILL)
events.subscribe("step_end", on_step_end)
"""
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "sharded optimizer": {"trainer__shard_optimizer": True},
    "fsdp": {"trainer__parallel": "fsdp"},
}


@pytest.mark.slow
def test_an_overflow_is_left_out_everywhere_with_one_hash_through_kills(
    finish: Finish, tmp_path: Path
) -> None:
    """The settings are Muon's, whose products are in float16, too."""
    program, hashes = changed_program(tmp_path, OVERFLOW_AND_KILL), set()
    settings = FLOAT16 | {"program": program, "optimizer__name": "muon", "snapshot__every": 10}
    for number, (workers, way) in enumerate([(1, "ddp"), (2, "sharded optimizer"), (3, "fsdp")]):
        run_dir = tmp_path / way / str(workers)
        launcher = torchrun(workers, restarts=1) if workers > 1 else [sys.executable]
        job = finish(launcher=launcher, run_dir=run_dir, trainer__workers=1, **settings, **WAYS[way])
        assert job.err().count("step 13: the gradient overflows float16: its update is left out") == 1, number
        scales = read_metric(run_dir, "loss_scale")
        assert (scales[12], scales[13], scales[30]) == (65_536, 32_768, 32_768)
        assert manifest(run_dir, 30)["loss_scale"] == {"scale": 32_768, "good_steps": 17}
        assert len(read_history(run_dir)["generations"]) == (1 if workers == 1 else 2)
        hashes.add(final_hash(run_dir))
    assert len(hashes) == 1


@pytest.mark.slow
def test_a_resume_keeps_float16_and_its_loss_scale(finish: Finish, tmp_path: Path) -> None:
    """The run resumes with trainer.dtype=auto, as where auto was float16 and is another type now."""
    auto = """
from mingpt.distributed import context
context.resolve_dtype = lambda wanted, device: "float16"
"""
    options: dict[str, Any] = {"run_dir": tmp_path, "trainer__workers": 1}
    finish(program=changed_program(tmp_path, auto), trainer__max_steps=10, **options)
    first = manifest(tmp_path, 10)
    assert first["loss_scale"] == {"scale": 65_536, "good_steps": 10}
    assert first["software"]["dtype"] == "float16"
    finish(trainer__max_steps=14, snapshot__resume="changed", **options)
    assert manifest(tmp_path, 14)["loss_scale"] == {"scale": 65_536, "good_steps": 14}
    assert manifest(tmp_path, 14)["software"]["dtype"] == "float16"


@pytest.mark.weekly
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_float16_learns_as_float32_does(name: str, finish: Finish, tmp_path: Path) -> None:
    last = []
    for dtype in ("float16", "float32"):
        numbers = {"trainer__max_steps": 200, "trainer__log_every": 10, "trainer__workers": 1}
        finish(run_dir=tmp_path / dtype, optimizer__name=name, trainer__dtype=dtype, **numbers)
        losses = read_metric(tmp_path / dtype)
        last.append(statistics.fmean(losses[step] for step in range(160, 201, 10)))
    assert abs(last[0] / last[1] - 1) < 0.02
