"""Runs of what users bring: models that they register, and a loop of their own."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.jobs import ROOT, Finish, Job, Start, children, final_hash, generations, torchrun
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


def start_loop(start: Start, folder: Path, workers: int, restarts: int = 0, steps: int = 60) -> Job:
    text = (ROOT / "examples" / "own_loop.py").read_text()
    assert text.count(" 900,") == 1
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(text.replace(" 900,", f" {steps},"))
    command = ["env", "-C", str(folder), *torchrun(workers, restarts), "loop.py"]
    return start(command, PYTHONPATH=str(ROOT))


def weights_of(job: Job) -> str:
    assert job.wait() == 0, job.err()
    line = job.out().splitlines()[-1]
    assert re.fullmatch("weights [0-9a-f]{64}", line)
    return line


def test_a_loop_of_ones_own_has_one_hash_through_a_kill_and_a_second_start(
    start: Start, tmp_path: Path
) -> None:
    """The second start goes on from the snapshots of the first, with another number of workers."""
    expected = weights_of(start_loop(start, tmp_path / "1", 1))
    job = start_loop(start, tmp_path / "2", 2, restarts=1, steps=40)
    job.wait_until(lambda: list(tmp_path.glob("2/own_loop/step_*.json")))
    os.kill(children(job.pid)[1], signal.SIGKILL)
    assert weights_of(job) != expected
    assert weights_of(start_loop(start, tmp_path / "2", 3)) == expected
