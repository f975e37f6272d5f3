"""sample.py, once started as a user starts it, otherwise in this process."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import sample
from support.golden import Golden
from support.hf_models import save_run

from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.tools.jobs import ROOT, clean_environment

CHARACTERS = "\n !,.T" + "abcdefghijklmnopqrstuvwxyz"
CONFIG = Config(
    data=DataConfig(block_size=32),
    model=ModelConfig(n_layer=2, n_head=2, n_embd=32),
    optimizer=OptimizerConfig(name="adamw"),
)
SMALLER = ModelConfig(n_layer=1, n_head=2, n_embd=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sampling") / "run"
    save_run(folder, CONFIG, CHARACTERS)
    return folder


def test_it_prints_the_prompt_and_the_text_and_nothing_else(run: Path) -> None:
    """There is more text than fits into the context; the seed determines it."""
    options = ["--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed"]
    again, other = (sample(run, *options, seed) for seed in ("1", "2"))
    line = [sys.executable, "sample.py", str(run), *options, "1"]
    one = subprocess.run(line, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True)
    assert one.stderr == "" and one.stdout.startswith("The ") and len(one.stdout) == len("The ") + 100 + 1
    assert one.stdout == again.stdout != other.stdout


@pytest.mark.parametrize("words", [["--prompt", ""], ["--top_p", "0"]])
def test_wrong_arguments_are_one_sentence(words: list[str], run: Path, golden: Golden) -> None:
    done = sample(run, *words)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1, done
    golden(done.stderr)


def test_the_newest_snapshot_is_used_or_the_best_if_it_is_asked_for(tmp_path: Path) -> None:
    save_run(tmp_path, CONFIG, CHARACTERS, step=30, loss=0.5)
    save_run(tmp_path, dataclasses.replace(CONFIG, model=SMALLER), CHARACTERS, step=60, loss=0.6)
    named = [(f"{tmp_path}/snapshots/step_000000{step}.json",) for step in (60, 30)]
    texts = [sample(*words, "--tokens", "30").stdout for words in ((tmp_path,), (tmp_path, "--best"), *named)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]
