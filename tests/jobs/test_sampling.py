"""sample.py, once started as a user starts it, otherwise in this process."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SMALL
from support.hf_models import save_run
from support.sampling import sample

from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.tools.jobs import clean_environment

CHARACTERS = "\n !,.T" + "abcdefghijklmnopqrstuvwxyz"
CONFIG = Config(
    data=DataConfig(block_size=SMALL["data.block_size"]),
    model=ModelConfig(n_layer=2, n_head=2, n_embd=32),
    optimizer=OptimizerConfig(name="adamw"),
)
SMALLER = ModelConfig(n_layer=1, n_head=2, n_embd=32)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with random weights."""
    folder = tmp_path_factory.mktemp("sampling") / "run"
    save_run(folder, CONFIG, CHARACTERS)
    return folder


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which sample.py refuses."""
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ")


def test_it_prints_the_prompt_and_the_text_and_nothing_else(run: Path) -> None:
    """There is more text than fits into the context; the seed determines it."""
    options = ["--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed"]
    again, other = (sample(run, *options, seed) for seed in ("1", "2"))
    line = [sys.executable, "sample.py", str(run), *options, "1"]
    environment = clean_environment()
    one = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert one.returncode == 0 and one.stderr == "" and one.stdout.startswith("The ")
    assert len(one.stdout) == len("The ") + 100 + 1 > SMALL["data.block_size"]
    assert one.stdout == again.stdout != other.stdout


SEE = "; see python -m mingpt sample --help"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nonsense"], f"unrecognized arguments: --nonsense{SEE}"),
        (["--tokens", "many"], f"argument --tokens: invalid int value: 'many'{SEE}"),
        (["--tokens", "-1"], f"--tokens must be at least 0 and below 2**63, not -1{SEE}"),
        (
            ["--prompt", ""],
            "the prompt is empty and there is nothing to continue: give at least one character",
        ),
        (["--temperature", "inf"], f"--temperature must be at least 0 and below 2**63, not inf{SEE}"),
        (["--top_p", "0"], f"--top_p must be above 0 and at most 1, not 0.0{SEE}"),
        (
            ["--prompt=--"],
            "the character '-' (U+002D, HYPHEN-MINUS) is not in the vocabulary of the 32 characters "
            "trained on",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(words: list[str], sentence: str, run: Path) -> None:
    assert error_of(sample(run, *words)) == f"{sentence}\n"


def test_several_samples_each_have_the_prompt_and_the_first_is_the_one_of_the_seed(run: Path) -> None:
    options = [run, "--prompt", "The ", "--tokens", "30"]
    one, two = sample(*options).stdout, sample(*options, "--num_samples", "2").stdout
    first, other = two.split("---------------\n")
    assert first == one != other and other.startswith("The ") and len(other) == len(one)


def test_the_newest_snapshot_is_used_or_the_best_if_it_is_asked_for(tmp_path: Path) -> None:
    save_run(tmp_path, CONFIG, CHARACTERS, step=30, loss=0.5)
    save_run(tmp_path, dataclasses.replace(CONFIG, model=SMALLER), CHARACTERS, step=60, loss=0.6)
    named = [(f"{tmp_path}/snapshots/step_000000{step}.json",) for step in (60, 30)]
    texts = [sample(*words, "--tokens", "30").stdout for words in ((tmp_path,), (tmp_path, "--best"), *named)]
    assert texts[:2] == texts[2:] and texts[0] != texts[1]


def test_a_device_that_cannot_be_used_is_one_sentence(run: Path) -> None:
    assert error_of(sample(run, "--device", "cuda:99")).startswith("--device cuda:99 cannot be used: ")
