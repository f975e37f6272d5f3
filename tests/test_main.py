"""`python -m mingpt COMMAND`: the commands, and the frame that they all share."""

import pytest

from mingpt.__main__ import main
from mingpt.base.command import run_command


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
