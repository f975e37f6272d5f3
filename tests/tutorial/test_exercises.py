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


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(EDITED))
def test_a_wrong_answer_is_refused_in_its_sentence(name: str, tmp_path: Path) -> None:
    edited = EDITED[name]
    text = (ROOT / edited["of"]).read_text()
    for was, is_now in edited["edits"]:
        assert text.count(was) == 1, was
        text = text.replace(was, is_now)
    answer = tmp_path / f"{name}.py"
    answer.write_text(text)
    code, output = check(name[0], answer)
    assert code == 1 and re.search(edited["says"], output), output
