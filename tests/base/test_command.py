"""The frame of the commands: their paths."""

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
