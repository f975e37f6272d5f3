"""The frame of the commands: their names, flags and paths, and where they print."""

import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from mingpt.__main__ import main
from mingpt.base.command import run_command


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "$RUN", "out"], "argument RUN: the path '$RUN' has a variable in it"),
        (["export", "run\x1b", "out"], "argument RUN: the path 'run\\x1b' has a line end or another control"),
        (["export", "run", "None"], "argument OUT_DIR: the path 'None' is not a path"),
        (["compare", "~/run", "run"], "/home/nobody-here/run is not there"),
        (["prepare", "text", "--out="], "argument --out: the path '' is not a path"),
    ],
)
def test_the_paths_of_every_command_are_read_alike(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/nobody-here")
    assert run_command(main, words) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"error: {sentence}") and shown.count("\n") == 1


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    assert run_command(Mock(side_effect=KeyboardInterrupt), []) == 130


@pytest.mark.parametrize(
    ("is_read", "code", "said"),
    [(True, 1, ""), (False, 2, "error: standard output cannot be written: No space left on device\n")],
)
def test_output_that_cannot_be_written_is_one_sentence_unless_its_reader_has_had_enough(
    is_read: bool, code: int, said: str
) -> None:
    read_end, pipe = os.pipe()
    os.close(read_end)
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "mingpt", "plan", "--help"]
        done = subprocess.run(
            command, stdout=pipe if is_read else full, stderr=subprocess.PIPE, text=True, check=False
        )
    os.close(pipe)
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["verfy"], "unknown command 'verfy', the commands are verify, compare, doctor, plan, "),
        ([""], "unknown command '', the commands are "),
        (["verify", "--kill", "1"], "unrecognized arguments: --kill; see python -m mingpt verify --help"),
        (["verify", "model.n_layers=1"], "unknown setting 'model.n_layers'; did you mean 'model.n_layer'?"),
        (["prepare", "text", "--out=out", "--tok"], "unrecognized arguments: --tok"),
        (["export", "run", "out", "--over"], "unrecognized arguments: --over"),
        (["timeline", "nowhere"], "nowhere has no run.json: give the folder of a run"),
        (["plan", "--worker", "2"], "unknown setting 'worker'"),
    ],
)
def test_a_mistake_or_an_abbreviated_flag_is_one_sentence_and_exit_code_2(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(main, words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {sentence}") and shown.err.count("\n") == 1, shown.err
