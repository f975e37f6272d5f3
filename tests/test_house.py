"""The packages of mingpt/: the rules of .ci/house.py, private names, and three calls to a gradient."""

import ast
import runpy
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

FILES = sorted((ROOT / "mingpt").rglob("*.py"))
PROGRAMS = [ROOT / "train.py", ROOT / "sample.py", *sorted((ROOT / "benchmarks").glob("*.py"))]


def test_the_rules_of_the_house_hold() -> None:
    done = subprocess.run([sys.executable, ROOT / ".ci" / "house.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "packages 13, layers 8" in done.stdout and "the core: " in done.stdout


def test_each_limit_of_a_budget_that_is_passed_is_a_sentence() -> None:
    house = runpy.run_path(str(ROOT / ".ci" / "house.py"))
    budget = house["Size"](statements=10, lines=30)
    assert list(house["over_budget"]("tests", house["Size"](10, 99, 30), budget)) == []
    assert list(house["over_budget"]("tests", house["Size"](11, 99, 1031), budget)) == [
        "tests: 11 statements, and its budget is 10",
        "tests: 1,031 lines, and its budget is 30",
    ]


def test_code_within_an_f_string_counts_as_outside_of_it(tmp_path: Path) -> None:
    house = runpy.run_path(str(ROOT / ".ci" / "house.py"))
    path = tmp_path / "file.py"
    path.write_text('x = f"{len(y)}"\n')
    # Module, Assign, Name, JoinedStr, FormattedValue, Call, Name, Name; Load and Store are no nodes of ours.
    assert house["size_of"]([path]) == house["Size"](statements=1, nodes=8, lines=1)


def test_docstrings_are_counted_with_comments_and_begin_with_a_noun(tmp_path: Path) -> None:
    house = runpy.run_path(str(ROOT / ".ci" / "house.py"))
    path = tmp_path / "file.py"
    path.write_text('"""Those\n\nlines."""\n\nx = 1  # a reason\ny = """Of no docstring"""\nz = 3\n')
    # The share is that of lines that are not blank.
    assert (house["share_of_words"]([path]), house["without_noun"]([path])) == (3 / 5, [f"{path}:1 Those"])


def test_every_package_says_what_it_promises() -> None:
    packages = [path for path in FILES if path.name == "__init__.py"]
    assert [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))] == []


INSIDE_TORCH = ("nccl.py",)  # about what torch does inside, for which it has no public names


def private_accesses(path: Path) -> list[str]:
    """Names with one leading underscore, read from anything but self, super, cls, torch or os.

    `_replace` does not count: it is a public method of named tuples.
    """
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            source = ast.unparse(node.value)
            if node.attr == "_replace":
                continue
            if source not in ("self", "super()", "cls") and source.split(".")[0] not in ("torch", "os"):
                found.append(f"{path.name}:{node.lineno} {source}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mingpt"):
            found += [
                f"{path.name}:{node.lineno} {alias.name}" for alias in node.names if alias.name[0] == "_"
            ]
    return found


def test_nobody_reaches_into_private_names() -> None:
    tests = sorted((ROOT / "tests").rglob("*.py"))
    paths = [path for path in [*FILES, *PROGRAMS, *tests] if path.name not in INSIDE_TORCH]
    assert [found for path in paths for found in private_accesses(path)] == []


def calls(function: str, path: Path) -> str:
    """The source of a function or method."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return ast.unparse(node)
    raise AssertionError(f"{path} has no {function}")


def test_from_the_command_to_a_gradient_are_three_calls() -> None:
    trainer = ROOT / "mingpt" / "training" / "trainer.py"
    main = calls("main", ROOT / "mingpt" / "launch" / "train.py")
    assert "Trainer(" in main and ".run()" in main
    assert "self.step()" in calls("run", trainer)
    assert ".backward()" in calls("step", trainer)
