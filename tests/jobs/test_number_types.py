"""The types of numbers: workers agree on one, a restart keeps it, and in float16 the loss scale is state."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import read_metric
from support.small_jobs import Begin, Finish, error_of, final_hash, generations, manifest

from mingpt.tools.jobs import torchrun

# In the first generation, the last worker overflows in step 13, and dies after step 17.
OVERFLOW_AND_KILL = """
import signal
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


@pytest.mark.slow
def test_an_overflow_is_left_out_everywhere_with_one_hash_through_kills(
    finish: Finish, tmp_path: Path
) -> None:
    """The settings are Muon's, whose products are in float16, too."""
    hashes, settings = set(), {"trainer__dtype": "float16", "optimizer__name": "muon", "snapshot__every": 10}
    cases: list[tuple[list[str], dict[str, Any]]] = [
        ([sys.executable], {}),
        (torchrun(2, restarts=1), {"trainer__shard_optimizer": True}),
        (torchrun(3, restarts=1), {"trainer__parallel": "fsdp"}),
    ]
    for number, (launcher, way) in enumerate(cases):
        run_dir, given = tmp_path / str(number), settings | way
        job = finish(code=OVERFLOW_AND_KILL, launcher=launcher, run_dir=run_dir, trainer__workers=1, **given)
        assert job.err().count("step 13: the gradient overflows float16: its update is left out") == 1, number
        scales = read_metric(run_dir, "loss_scale")
        assert (scales[12], scales[13], scales[30]) == (65_536, 32_768, 32_768)
        assert manifest(run_dir, 30)["loss_scale"] == {"scale": 32_768, "good_steps": 17}
        assert len(generations(run_dir)) == (1 if number == 0 else 2)
        hashes.add(final_hash(run_dir))
    assert len(hashes) == 1


AUTO_IS_FLOAT16 = """
from mingpt.distributed import context
context.resolve_dtype = lambda wanted, device: "float16"
"""


@pytest.mark.slow
def test_a_resume_keeps_float16_and_its_loss_scale(finish: Finish, run_dir: Path) -> None:
    """The run resumes with trainer.dtype=auto, as where auto was float16 and is another type now."""
    changed = {"snapshot__resume": "changed"}
    for steps, options in ((10, {"code": AUTO_IS_FLOAT16}), (14, changed)):
        finish(trainer__workers=1, trainer__max_steps=steps, **options)
        assert manifest(run_dir, steps)["loss_scale"] == {"scale": 65_536, "good_steps": steps}
        assert manifest(run_dir, steps)["software"]["dtype"] == "float16"


# All workers have fast bfloat16 but one, as on another model of CPU.
NO_BFLOAT16 = """
from mingpt.distributed import device
device.has_fast_bfloat16 = lambda: True
def on_start(launch):
    if launch.rank == 1:
        device.has_fast_bfloat16 = lambda: False
events.subscribe("worker_start", on_start)
"""


@pytest.mark.slow
def test_workers_agree_on_a_type_that_all_of_them_have(finish: Finish, run_dir: Path) -> None:
    finish(code=NO_BFLOAT16, launcher=torchrun(2), trainer__max_steps=2)
    assert manifest(run_dir, 2)["software"]["dtype"] == "float32"


# The first snapshot is changed to one that a GPU computed; then the worker of the first generation dies.
GPU_IS_GONE = """
import json, signal
from pathlib import Path
from mingpt.snapshot.manifest import add_checksum
def on_step(step):
    path = Path({path!r})
    if path.exists() and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        fields = json.loads(path.read_text())
        fields["software"]["device_type"] = "cuda"
        path.write_bytes(add_checksum(fields))
        os.kill(os.getpid(), signal.SIGKILL)
events.subscribe("step_end", on_step)
"""


@pytest.mark.slow
def test_without_the_gpu_that_computed_the_snapshots_a_run_goes_on_only_if_that_is_asked_for(
    begin: Begin, finish: Finish, run_dir: Path
) -> None:
    """Neither a restart nor a new job goes on by itself."""
    code = GPU_IS_GONE.format(path=str(run_dir / "snapshots" / "step_00000100.json"))
    settings: dict[str, Any] = {"trainer__eval_every": 1000, "trainer__max_steps": 101}
    settings |= {"snapshot__memory_every": 0, "snapshot__every": 100}
    job = begin(code=code, launcher=torchrun(2, restarts=3), **settings)
    line = error_of(job, code=1)  # the exit code is torchrun's; its workers end with 2
    assert "were computed on cuda" in line and "have cpu" in line
    assert len(generations(run_dir)) == 1
    assert "snapshot.resume=changed" in error_of(begin(trainer__workers=1, **settings))
    accepted = finish(trainer__workers=1, snapshot__resume="changed", **settings)
    assert "the bits may differ" in accepted.err()
