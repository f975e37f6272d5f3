"""`python -m mingpt COMMAND`: the commands, and the frame that they all share."""

import pytest

from mingpt.__main__ import COMMANDS, main
from mingpt.base.command import run_command


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"python -m mingpt {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "the following arguments are required: COMMAND; see python -m mingpt --help"),
        (["verfy"], "argument COMMAND: invalid choice: 'verfy'"),
        (["verify", "--kill", "1"], "unrecognized arguments: --kill 1; see python -m mingpt verify --help"),
        (["prepare", "--tok", "out"], "unrecognized arguments: --tok"),
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
