"""The checker of the exercises holds each solution, and names what is wrong with each wrong answer."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from mingpt.tools.jobs import ROOT, clean_environment

FOLDER = Path(__file__).parent / "exercises"
EXERCISES = sorted((ROOT / "tutorial" / "exercises").glob("[0-9]_*.py"))
SOLUTIONS = ROOT / "tutorial" / "exercises" / "solutions"
WHOLE = {path.stem: path for path in (FOLDER / "wrong").glob("*.py")}
EDITED = tomllib.loads((FOLDER / "wrong.toml").read_text())


def check(*words: object) -> tuple[int, str]:
    """Exit code and output of the checker; it prints no traceback, and leaves no process."""
    command = [sys.executable, "-m", "tutorial.check", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert "Traceback" not in done.stdout and done.stderr == "", done
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda path: path.stem)
def test_a_solution_holds_and_the_file_to_fill_does_not(exercise: Path) -> None:
    code, output = check(exercise.name[0], SOLUTIONS / exercise.name)
    assert code == 0 and output.startswith("holds: "), output
    code, output = check(exercise.name[0])
    assert code == 1 and "is still to be written" in output


def write_answer(name: str, answer: Path) -> str:
    """Write a wrong answer to a file; return a pattern of the sentence that refuses it."""
    if name in WHOLE:
        text = WHOLE[name].read_text()
        answer.write_text(text)
        return text.partition("\n")[0].removeprefix("# The checker says: ")
    edited = EDITED[name]
    text = (ROOT / edited["of"]).read_text()
    for was, is_now in edited["edits"]:
        assert text.count(was) == 1, was
        text = text.replace(was, is_now)
    answer.write_text(text)
    return str(edited["says"])


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*EDITED, *WHOLE}))
def test_a_wrong_answer_is_refused_in_its_sentence(name: str, tmp_path: Path) -> None:
    answer = tmp_path / f"{name}.py"
    says = write_answer(name, answer)
    code, output = check(name[0], answer)
    assert code == 1 and says and re.search(says, output), output


def test_what_is_not_there_is_told(tmp_path: Path) -> None:
    assert check("9")[0] == 2 and check()[0] == 2
    assert check("1", tmp_path / "answer.py") == (2, f"there is no file {tmp_path / 'answer.py'}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def all_reduce(tensor):", r"answer.py cannot be imported: line 1: IndentationError"),
        ("import nothing", r"in line 1 of answer.py, `import nothing`: ModuleNotFoundError"),
        ("all_reduce = 1", "answer.py defines no all_reduce"),
        ("def all_reduce(): ...", "calling it as the exercise's page says fails: TypeError"),
        ("import os\ndef all_reduce(tensor): os._exit(3)", "the process ended with exit code 3 before"),
        ("def all_reduce(tensor):\n    while True: pass", "computing without end in line 2 of answer.py"),
        ("import time\ntime.sleep(99)", r"waiting in line 2 of answer.py, `time.sleep\(99\)`"),
        ("def all_reduce(tensor): return tensor.tolist()", "all_reduce returned a list; it has to be"),
        ("def all_reduce(tensor): ...", r"returned nothing; it has to be a tensor of shape \[10000\]"),
    ],
)
def test_whatever_a_file_does_is_told_in_a_sentence(code: str, expected: str, tmp_path: Path) -> None:
    answer = tmp_path / "answer.py"
    answer.write_text(f"{code}\n")
    exit_code, output = check("1", answer)
    assert exit_code == 1 and re.search(expected, output), output
    assert len(output.splitlines()) == 1
