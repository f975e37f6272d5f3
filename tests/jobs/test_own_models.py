"""Runs of models that a user may register."""

from pathlib import Path

import pytest
from conftest import ROOT, Finish, changed_program, final_hash
from support.jobs import read_history
from support.odd_models import MODELS
from support.sampling import sample

from mingpt.model import parameter_shapes
from mingpt.model.gpt import ARCHITECTURES

REGISTER = f"""
sys.path.append({str(ROOT / "tests")!r})
from support import odd_models
odd_models.register("NAME")
"""
KILL = """
import os
def kill(step):
    if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
events.subscribe("step_end", kill)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ones_own_is_trained_resumed_and_sampled(
    name: str, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers are killed at step 5, and resume from step 4."""
    code, hashes = REGISTER.replace("NAME", name), []
    for workers, more in ((1, ""), (3, KILL)):
        run_dir, program = tmp_path / str(workers), changed_program(tmp_path, code + more)
        finish(
            program=program,
            run_dir=run_dir,
            trainer__workers=workers,
            trainer__max_steps=8,
            trainer__replay_every=3,
            snapshot__every=4,
            model__arch="gpt2",
        )
        hashes.append(final_hash(run_dir, 8))
    assert hashes[0] == hashes[1] and len(read_history(run_dir)["generations"]) == 2
    monkeypatch.setitem(ARCHITECTURES, "gpt2", MODELS[name])
    parameter_shapes.cache_clear()
    done = sample(run_dir, "--prompt", "THE", "--tokens", "9")
    parameter_shapes.cache_clear()
    assert done.returncode == 0 and done.stdout.startswith("THE"), done.stderr
