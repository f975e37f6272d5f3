"""A restart computes with the dtype and the kind of device that the run began with, on all workers."""

from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, changed_program, command, error_of, manifest, snapshot_steps
from support.jobs import read_history

from mingpt.snapshot.manifest import add_checksum
from mingpt.tools.jobs import torchrun

# For one worker bfloat16 is slow, as on another model of CPU.
NO_BFLOAT16 = """
from mingpt.distributed import device
def on_start(launch):
    if launch.rank == {rank}:
        device.has_fast_bfloat16 = lambda: False
events.subscribe("worker_start", on_start)
"""
BFLOAT16 = """
from mingpt.distributed import device
device.has_fast_bfloat16 = lambda: {native}
"""
# The first snapshot is changed to one that a GPU computed; then the worker of the first generation dies.
GPU_IS_GONE = """
import json, os, signal
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


def change_software(run_dir: Path, **fields: str) -> None:
    """Change the newest snapshot as if it had been written with other software or hardware."""
    step = snapshot_steps(run_dir)[-1]
    content = manifest(run_dir, step)
    content["software"] |= fields
    (run_dir / "snapshots" / f"step_{step:08d}.json").write_bytes(add_checksum(content))


@pytest.mark.slow
def test_a_restart_without_the_gpu_ends_the_job_in_one_sentence(
    start: Start, text: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "snapshots" / "step_00000100.json"
    program = changed_program(tmp_path, GPU_IS_GONE.format(path=str(path)))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "snapshot__memory_every": 0}
    settings |= {"trainer__eval_every": 1000, "trainer__max_steps": 100_000, "snapshot__resume": "changed"}
    settings["snapshot__every"] = 100  # there is no second snapshot before the first is seen
    job = start(command(launcher=torchrun(2, restarts=3), program=program, **settings))
    line = error_of(job, code=1)  # the exit code is torchrun's; its workers end with 2
    assert "were computed on cuda" in line and "have cpu" in line
    assert len(read_history(tmp_path / "run")["generations"]) == 1


@pytest.mark.slow
def test_other_hardware_is_refused_unless_asked_for(
    start: Start, finish: Finish, text: Path, copied: Path, tmp_path: Path
) -> None:
    change_software(copied, device_type="cuda", device="NVIDIA H100")
    program = changed_program(tmp_path, BFLOAT16.format(native=False))
    settings: dict[str, Any] = {"program": program, "run_dir": copied, "trainer__workers": 1}
    finish(**settings)  # a finished run needs no such hardware
    (copied / "snapshots" / "step_00000030.json").unlink()
    change_software(copied, device_type="cuda", device="NVIDIA H100")
    line = error_of(start(command(data__path=text, **settings)))
    assert "snapshot.resume=changed" in line and "computed" in line
    accepted = finish(**settings, trainer__max_steps=31, snapshot__resume="changed")
    assert "the bits may differ" in accepted.err()


@pytest.mark.slow
def test_workers_agree_on_a_type_that_all_of_them_have(finish: Finish, tmp_path: Path) -> None:
    """dtype auto is float32 as soon as bfloat16 is slow for one worker."""
    for rank, expected in ((1, "float32"), (7, "bfloat16")):
        run_dir = tmp_path / f"without-{rank}"
        code = BFLOAT16.format(native=True) + NO_BFLOAT16.format(rank=rank)
        program = changed_program(tmp_path, code)
        finish(launcher=torchrun(2), program=program, run_dir=run_dir, trainer__max_steps=2)
        assert manifest(run_dir, 2)["software"]["dtype"] == expected
        assert manifest(run_dir, 2)["software"]["device_type"] == "cpu"
