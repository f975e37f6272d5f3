import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from mingpt.__main__ import main
from mingpt.base.command import run_command
from mingpt.base.errors import UserError
from mingpt.config.cli import parse


def test_a_named_pipe_is_refused_also_behind_a_link(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    with pytest.raises(UserError, match=r"the configuration file .*/link is a named pipe"):
        parse([str(tmp_path / "link")])


def test_the_pipe_of_another_process_is_read(tmp_path: Path) -> None:
    """A shell's <(command) names such a pipe, which has no name in a folder."""
    code = "import sys; from mingpt.config.cli import parse; print(parse(sys.argv[1:]).seed)"
    words = [sys.executable, "-c", code, "/dev/stdin"]
    assert subprocess.check_output(words, input="seed: 008", text=True, cwd=ROOT) == "8\n"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["export", "$RUN", "out"], "argument RUN: the path '$RUN' has a variable in it"),
        (["export", "run", "None"], "argument OUT_DIR: the path 'None' is not a path"),
        (["compare", "run", "${OTHER}"], "argument RUN: the path '${OTHER}' has a variable in it"),
        (["compare", "~/run", "run"], "/home/nobody-here/run is not there"),
        (["timeline", "x" * 256], "argument RUN: the path '" + "x" * 256 + "' has a name of more than 255"),
        (["prepare", "text", "--out=null"], "argument --out: the path 'null' is not a path"),
        (["prepare", "a::b", "--out=out"], "argument TEXT_OR_URL: the path 'a::b' has :: in it"),
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
