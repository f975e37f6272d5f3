"""Runs of models that users register."""

from pathlib import Path

import pytest
from support.jobs import ROOT, Finish, final_hash, generations
from support.odd_models import MODELS

pytestmark = pytest.mark.slow
REGISTER = f"""
sys.path.append({str(ROOT / "tests")!r})
from support import odd_models
odd_models.register("NAME")
"""
KILL = """
def kill(step):
    if step == 5 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), 9)
events.subscribe("step_end", kill)
"""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_ones_own_is_trained_and_resumed(name: str, finish: Finish, tmp_path: Path) -> None:
    """Three workers are killed at step 5, and resume from step 4."""
    alone, killed, code = tmp_path / "alone", tmp_path / "killed", REGISTER.replace("NAME", name)
    given = {"trainer__max_steps": 8, "trainer__replay_every": 3, "snapshot__every": 4, "model__arch": "gpt2"}
    finish(code=code, run_dir=alone, trainer__workers=1, **given)
    finish(code=code + KILL, run_dir=killed, trainer__workers=3, **given)
    assert final_hash(killed, 8) == final_hash(alone, 8) and len(generations(killed)) == 2
