"""sample.py, once started as a user starts it, otherwise in this process."""

import dataclasses
import io
import subprocess
import sys
import threading
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
CONFIG = Config(
    data=DataConfig(block_size=SMALL["data.block_size"]),
    model=ModelConfig(n_layer=2, n_head=2, n_embd=32),
    optimizer=OptimizerConfig(name="adamw"),
)
PROMPT = "prompt (Ctrl-D ends): "
# SIGINT is ignored below a shell's background job, and a program would inherit that.
SPAWN = (
    "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: the model is too small to share, and on a busy machine threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


def run_program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run sample.py as a user starts it."""
    line = [sys.executable, "sample.py", *words]
    options: dict[str, Any] = {"cwd": ROOT, "env": clean_environment(), "capture_output": True}
    return subprocess.run(line, text=True, check=False, **options)


def test_it_prints_the_prompt_and_the_text_and_nothing_else(run: Path) -> None:
    """There is more text than fits into the context; the seed determines it."""
    options = ["--prompt", "The ", "--tokens", "100", "--top_k", "5", "--seed"]
    again, other = (sample(run, *options, seed) for seed in ("1", "2"))
    one = run_program(str(run), *options, "1")
    assert one.returncode == 0 and one.stderr == "" and one.stdout.startswith("The ")
    assert len(one.stdout) == len("The ") + 100 + 1 > SMALL["data.block_size"]
    assert one.stdout == again.stdout != other.stdout


def test_without_a_snapshot_it_says_so_in_one_sentence(tmp_path: Path) -> None:
    assert "there is no snapshot in" in error_of(sample(tmp_path))


def test_a_folder_in_hugging_faces_format_gives_the_text_of_the_run_it_is_from(
    run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "hf"
    export(str(run), str(out))
    words = ["--prompt", "The ", "--tokens", "60"]
    assert sample(out, *words).stdout == sample(run, *words).stdout
    assert "give a run folder" in error_of(sample(out / "model.safetensors"))


SEE = "; see python -m mingpt sample --help"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--nonsense"], f"unrecognized arguments: --nonsense{SEE}"),
        (["--tokens", "many"], f"argument --tokens: invalid int value: 'many'{SEE}"),
        (["--tokens", "-1"], f"--tokens must be at least 0, not -1{SEE}"),
        (
            ["--prompt", ""],
            "the prompt is empty and there is nothing to continue: give at least one character",
        ),
        (["--temperature", "inf"], f"--temperature must be a finite number of at least 0, not inf{SEE}"),
        (["--top_p", "0"], f"--top_p must be above 0 and at most 1, not 0.0{SEE}"),
        (["--max_new_tokens=5"], f"here nanoGPT's --max_new_tokens is --tokens N{SEE}"),
        (
            ["--start", "FILE:prompt.txt"],
            f"here nanoGPT's --start is --prompt TEXT, and --start=FILE:PATH is --prompt_file PATH{SEE}",
        ),
        (["--prompt_file", "/nope"], "--prompt_file /nope cannot be read: No such file or directory"),
        (["--prompt_file=--"], "--prompt_file -- cannot be read: No such file or directory"),
        (["--prompt_tokens=--"], "--prompt_tokens must be numbers below 32, as in 464,3290, not '--'"),
        (
            ["--prompt=--"],
            "the character '-' (U+002D, HYPHEN-MINUS) is not in the vocabulary of the 32 characters "
            "trained on",
        ),
        (
            ["--prompt", "a", "--prompt_tokens", "1"],
            f"argument --prompt_tokens: not allowed with argument --prompt{SEE}",
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


def test_the_best_snapshot_is_used_if_it_is_asked_for(tmp_path: Path) -> None:
    small = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, n_layer=1))
    save_run(tmp_path, CONFIG, CHARACTERS, step=30, loss=0.5)
    save_run(tmp_path, small, CHARACTERS, step=60, loss=0.6)
    best, newest = (tmp_path / "snapshots" / f"step_000000{step}.json" for step in (30, 60))
    texts = [sample(*words, "--tokens", "30").stdout for words in ([tmp_path], [tmp_path, "--best"])]
    assert texts == [sample(where, "--tokens", "30").stdout for where in (newest, best)]
    assert texts[0] != texts[1]


def test_the_device_is_the_one_that_is_asked_for_or_one_sentence(run: Path) -> None:
    options = [run, "--prompt", "The ", "--tokens", "5", "--device"]
    assert sample(*options, "cpu").stdout.startswith("The ")
    error = error_of(sample(*options, "cuda:99"))
    assert error.startswith("--device cuda:99 cannot be used: ")


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


def read_until(terminal: "subprocess.Popen[bytes]", wanted: str) -> str:
    """The text that a terminal shows, up to `wanted`, with the line ends of a file."""
    shown = ""
    while wanted not in shown:
        assert terminal.stdout
        piece = terminal.stdout.read(1)
        assert piece, shown
        shown = (shown + piece.decode()).replace("\r\n", "\n")
    return shown


@pytest.mark.slow
def test_in_a_terminal_it_asks_for_prompts_until_ctrl_d(run: Path) -> None:
    """The cases: a whole text, Ctrl-C in a text, an unknown character, and the default prompt."""
    options = [str(run), "--top_k", "5", "--tokens"]
    texts = {prompt: sample(*options, "100", "--prompt", prompt).stdout for prompt in ("The ", "king", "\n")}
    stop = texts["The "][60:68]
    unknown = (
        "the character 'X' (U+0058, LATIN CAPITAL LETTER X) is not in the vocabulary of the 32 characters "
        "trained on"
    )
    words = [sys.executable, "sample.py", *options, "1000000", "--stop", stop]
    terminal = subprocess.Popen(
        [sys.executable, "-c", SPAWN, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=clean_environment(TERM="dumb", OMP_NUM_THREADS="1"),
        bufsize=0,
    )
    timer = threading.Timer(240, terminal.kill)  # on a busy machine its start alone may take a minute
    timer.start()
    with terminal:
        assert terminal.stdin
        for keys, wanted in (
            (b"", PROMPT),
            (b"The \n", f"{texts['The '][:60]}\n{PROMPT}"),
            (b"king\n", texts["king"][:90]),
            (b"\x03", PROMPT),
            (b"X\n", f"X\nerror: {unknown}\n{PROMPT}"),
            (b"\n", texts["\n"][:90]),
            (b"\x03", PROMPT),
            (b"\x04", "\n"),
        ):
            terminal.stdin.write(keys)
            read_until(terminal, wanted)
        assert terminal.wait() == 0
    timer.cancel()
