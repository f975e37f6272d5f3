"""Training in float16: the loss scale is a part of the state."""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Finish, final_hash, generations, manifest, read_metric, torchrun

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
        # The kill may come before the snapshot of step 15 is whole in memory; then step 13 is made again.
        times = 1 + sum(entry["from_step"] < 13 for entry in generations(run_dir)[1:])
        assert job.err().count("step 13: the gradient overflows float16: its update is left out") == times
        scales = read_metric(run_dir, "loss_scale")
        assert (scales[12], scales[13], scales[30]) == (65_536, 32_768, 32_768)
        assert manifest(run_dir, 30)["loss_scale"] == {"scale": 32_768, "good_steps": 17}
        assert len(generations(run_dir)) == (1 if number == 0 else 2)
        weights = manifest(run_dir, 30)["files"][0]["sha256"]
        assert f"SHA-256 of the weights at step 30: {weights}" in job.err()
        hashes.add(final_hash(run_dir))
    assert len(hashes) == 1
