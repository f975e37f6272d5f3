"""The packages of mingpt/: the rules of .ci/house.py, and what they promise."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

from support.golden import sentences

from mingpt.tools.jobs import ROOT

HOUSE = runpy.run_path(str(ROOT / ".ci" / "house.py"))


def test_the_rules_of_the_house_hold() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "house.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages 13, layers 8" in done.stdout and "the core: " in done.stdout


def test_each_limit_of_a_budget_that_is_passed_is_a_sentence() -> None:
    budget = HOUSE["Size"](statements=10, lines=30)
    assert list(HOUSE["over_budget"]("tests", HOUSE["Size"](10, 99, 30), budget)) == []
    assert list(HOUSE["over_budget"]("tests", HOUSE["Size"](11, 99, 1031), budget)) == [
        "tests: 11 statements, and its budget is 10",
        "tests: 1,031 lines, and its budget is 30",
    ]


def test_code_within_an_f_string_counts_as_outside_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('x = f"{len(y)}"\n')
    # Module, Assign, Name, JoinedStr, FormattedValue, Call, Name, Name; Load and Store are no nodes of ours.
    assert HOUSE["size_of"]([path]) == HOUSE["Size"](statements=1, nodes=8, lines=1)


def test_docstrings_are_counted_with_comments_and_begin_with_a_noun(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text('"""Those\n\nlines."""\n\nx = 1  # a reason\ny = """Of no docstring"""\nz = 3\n')
    # The share is that of lines that are not blank.
    assert (HOUSE["share_of_words"]([path]), HOUSE["without_noun"]([path])) == (3 / 5, [f"{path}:1 Those"])


def test_every_package_says_what_it_promises() -> None:
    packages = [*(ROOT / "mingpt").rglob("__init__.py")]
    assert len(packages) > 13
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_each_sentence_belongs_to_a_test() -> None:
    texts = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    places = [key.partition("[")[0].split("::") for key in sentences()]
    assert [place for place in places if f"def {place[1]}(" not in texts.get(place[0], "")] == []
