"""sample.py, once started as a user starts it, else in this process."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SMALL
from support.hf_models import save_run
from support.sampling import sample

from mingpt.config import Config, DataConfig, ModelConfig, OptimizerConfig
from mingpt.tools.export import export
from mingpt.tools.jobs import clean_environment

CHARACTERS = "\n !,.T" + "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """This model is too small to share, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder with random weights."""
    folder = tmp_path_factory.mktemp("sampling") / "run"
    config = Config(
        data=DataConfig(block_size=SMALL["data.block_size"]),
        model=ModelConfig(n_layer=2, n_head=2, n_embd=32),
        optimizer=OptimizerConfig(name="adamw"),
    )
    save_run(folder, config, CHARACTERS)
    return folder


def error_of(done: subprocess.CompletedProcess[str]) -> str:
    """The one line with which sample.py refuses."""
    assert done.returncode == 2 and done.stdout == "", done
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr.removeprefix("error: ")


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    """As a user starts it."""
    line = [sys.executable, "sample.py", *words]
    options: dict[str, Any] = {"cwd": ROOT, "env": clean_environment(), "capture_output": True}
    return subprocess.run(line, text=True, check=False, **options)


def test_a_prompt_with_an_unknown_character_names_it(run: Path) -> None:
    error = error_of(sample(run, "--prompt", "The king ☃"))
    assert error.startswith("the character '☃' (U+2603) is not in the vocabulary")


def test_it_prints_the_prompt_and_the_text_and_nothing_else(run: Path) -> None:
    """More text than fits into the context; the seed determines it."""
    options = ["--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed"]
    again, other = (sample(run, *options, seed) for seed in ("1", "2"))
    one = run_program(str(run), *options, "1")
    assert one.returncode == 0 and one.stderr == "" and one.stdout.startswith("The ")
    assert len(one.stdout) == len("The ") + 100 + 1 > SMALL["data.block_size"]
    assert one.stdout == again.stdout != other.stdout


def test_without_a_snapshot_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    assert "there is no snapshot in" in error_of(sample(tmp_path))


def test_a_folder_in_the_format_of_hugging_face_is_told_from_an_empty_one(run: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "hf")
    export(str(run), out)
    error = error_of(sample(out, "--prompt", "The "))
    assert f"there is no snapshot in {out}" in error and "a folder in Hugging Face's format is for" in error


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nonsense"], "unrecognized arguments: --nonsense; see python sample.py --help"),
        (["--tokens", "many"], "argument --tokens: invalid int value: 'many'; see python sample.py --help"),
        (["--tokens", "-1"], "--tokens must be at least 0, not -1; see python sample.py --help"),
        (
            ["--prompt", ""],
            "the prompt is empty and there is nothing to continue: give at least one character",
        ),
        (["--prompt_file", "/nope"], "--prompt_file /nope cannot be read: No such file or directory"),
        (
            ["--prompt", "a", "--prompt_tokens", "1"],
            "argument --prompt_tokens: not allowed with argument --prompt; see python sample.py --help",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(words: list[str], sentence: str, run: Path) -> None:
    assert error_of(sample(run, *words)) == f"{sentence}\n"


def test_several_samples_each_have_the_prompt_and_the_first_is_the_one_of_the_seed(run: Path) -> None:
    options = [run, "--prompt", "The ", "--tokens", "30"]
    one, two = sample(*options).stdout, sample(*options, "--num_samples", "2").stdout
    assert two.startswith(one) and two[len(one) :].startswith("The ") and len(two) == 2 * len(one)
    assert two[len(one) :] != one


def test_a_sample_ends_before_the_text_to_stop_at(run: Path) -> None:
    options = [run, "--prompt", "The ", "--tokens", "100", "--top_k", "5"]
    whole = sample(*options).stdout.removesuffix("\n")
    stop = whole[50:53]
    assert sample(*options, "--stop", stop).stdout == whole[: whole.index(stop, len("The "))] + "\n"
    assert sample(*options, "--stop", "\u2603").stdout == whole + "\n"


def test_the_prompt_may_come_from_a_file_or_from_stdin(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt").write_text("The king\n")
    options = [run, "--tokens", "20"]
    expected = sample(*options, "--prompt", "The king\n").stdout
    assert sample(*options, "--prompt_file", tmp_path / "prompt").stdout == expected
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The king\n")))
    assert sample(*options, "--prompt_file", "-").stdout == expected
    (tmp_path / "bytes").write_bytes(b"The \xff")
    assert "cannot be read" in error_of(sample(*options, "--prompt_file", tmp_path / "bytes"))
    (tmp_path / "empty").write_bytes(b"")
    assert "the prompt is empty" in error_of(sample(*options, "--prompt_file", tmp_path / "empty"))
