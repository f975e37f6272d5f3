"""Runs of what users bring: models that they register, a loop of their own, a model of Hugging Face's."""

import os
import re
import signal
from pathlib import Path

import pytest
from support.hf_models import their_model
from support.jobs import Job, children, read_metric
from support.odd_models import MODELS
from support.sampling import sample
from support.small_jobs import Finish, Start, final_hash, generations, manifest
from support.vocabularies import cl100k_like

from mingpt.config import ModelConfig
from mingpt.data import JsonTokenizer
from mingpt.model import parameter_shapes
from mingpt.model.gpt import ARCHITECTURES
from mingpt.tools.import_model import import_model
from mingpt.tools.jobs import ROOT, torchrun

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
def test_a_model_of_ones_own_is_trained_resumed_and_sampled(
    name: str, finish: Finish, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three workers are killed at step 5, and resume from step 4."""
    alone, killed, code = tmp_path / "alone", tmp_path / "killed", REGISTER.replace("NAME", name)
    given = {"trainer__max_steps": 8, "trainer__replay_every": 3, "snapshot__every": 4, "model__arch": "gpt2"}
    finish(code=code, run_dir=alone, trainer__workers=1, **given)
    finish(code=code + KILL, run_dir=killed, trainer__workers=3, **given)
    assert final_hash(killed, 8) == final_hash(alone, 8) and len(generations(killed)) == 2
    monkeypatch.setitem(ARCHITECTURES, "gpt2", MODELS[name])
    parameter_shapes.cache_clear()
    done = sample(killed, "--prompt", "THE", "--tokens", "9")
    parameter_shapes.cache_clear()
    assert done.returncode == 0 and done.stdout.startswith("THE"), done.stderr


def start_loop(start: Start, folder: Path, workers: int, restarts: int = 0, steps: int = 60) -> Job:
    """Start the example of a loop of one's own, with fewer steps, in a folder."""
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


def test_an_import_is_sampled_and_trained_and_may_be_gone_when_the_run_goes_on(
    finish: Finish, text: Path, run_dir: Path, tmp_path: Path
) -> None:
    """Only the first of two workers reads the import."""
    bpe, theirs, origin = (
        JsonTokenizer(cl100k_like(text.read_text(), 300)),
        tmp_path / "hf",
        tmp_path / "origin",
    )
    their_model(ModelConfig(n_layer=2, n_head=2, n_embd=32), len(bpe), 32).save_pretrained(theirs)
    (theirs / "tokenizer.json").write_bytes(bpe.to_bytes())
    import_model(str(theirs), str(origin))
    assert sample(origin, "--prompt", "The ", "--tokens", "9").stdout.startswith("The ")
    finish(trainer__workers=2, trainer__max_steps=2, snapshot__init_from=origin)
    tokenizer = manifest(origin, 0)["tokenizer"]
    origin.rename(tmp_path / "moved")
    changed = {"snapshot__resume": "changed", "snapshot__init_from": origin}
    finish(trainer__workers=1, trainer__max_steps=4, **changed)
    assert sorted(read_metric(run_dir)) == [1, 2, 3, 4]
    assert manifest(run_dir, 4)["tokenizer"] == tokenizer
