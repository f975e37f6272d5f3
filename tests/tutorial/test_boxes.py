"""Lessons 9 and 10 end at the loss of lesson 1, and hold and send the bytes that the page shows."""

import re

import pytest
from support.forked import WAYS
from support.pages import blocks, command_of, not_printed

from mingpt.tools.jobs import ROOT

FOLDER = ROOT / "tutorial"
PAGE = FOLDER / "boxes.md"
ROW = re.compile(r"^(\w[\w ]*?) {2,}([\d,]+) +([\d,]+)$", re.MULTILINE)
# Lesson 1, and the programs that the page shows, with their options.
PROGRAMS = (
    "1_single",
    "9_ddp",
    "9_ddp --torch",
    "9_ddp --micro_batches 2",
    "9_ddp --micro_batches 2 --no_no_sync",
    "9_ddp --link_mb_per_s 20",
    "9_ddp --link_mb_per_s 20 --no_overlap",
    "10_zero1",
    "10_zero1 --torch",
    "10_zero2",
    "10_zero2 --torch",
    "10_zero3",
    "10_zero3 --torch",
    "10_zero3 --checkpoint",
)


@pytest.fixture(scope="module", params=WAYS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, found = tmp_path_factory.mktemp("boxes"), {}
    for name in PROGRAMS:
        program, _, options = name.partition(" ")
        found[name] = request.param(f"{command_of(FOLDER / f'{program}.py')} {options}", folder)
    return found


def final_loss(output: str) -> float:
    return float(output.splitlines()[-1].removeprefix("final loss "))


def bytes_by_rank(output: str) -> dict[str, tuple[int, int]]:
    return {row: (as_int(first), as_int(second)) for row, first, second in ROW.findall(output)}


def as_int(figure: str) -> int:
    return int(figure.replace(",", ""))


@pytest.mark.slow
def test_all_programs_end_at_the_loss_of_lesson_1(runs: dict[str, str]) -> None:
    losses = {name: final_loss(output) for name, output in runs.items()}
    assert losses == pytest.approx(dict.fromkeys(runs, losses["1_single"]), abs=1e-5)


@pytest.mark.slow
def test_the_page_shows_the_bytes_that_the_programs_print(runs: dict[str, str]) -> None:
    shown = {given["run"].replace(",", " "): text for _, given, text in blocks(PAGE) if "run" in given}
    assert len(shown) > 3
    assert [not_printed(text, runs[name]) for name, text in shown.items()] == [[]] * len(shown)
    table = re.findall(r"^\| (\S+?\.py[^|]*?) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    names = ("weights", "gradients", "optimizer state", "sent in a step")
    for program, cells in table:
        found = bytes_by_rank(runs[program.replace(".py", "").replace("`", "")])
        assert [as_int(cell) for cell in cells.split(" | ")] == [found[name][1] for name in names], program
    assert len(table) == 8


def test_code_and_commands_on_the_page_are_those_of_the_programs() -> None:
    commands = [command_of(path) for path in sorted(FOLDER.glob("*_*.py")) if path.name[:2] in ("9_", "10")]
    for kind, given, text in blocks(PAGE):
        if kind == "python":
            assert text in (FOLDER / given["of"]).read_text(), text
        if kind == "bash":
            assert all(line.startswith(tuple(commands)) for line in text.splitlines()), text
    used = {given.get("of") for _, given, _ in blocks(PAGE)}
    assert used >= {path.name for path in FOLDER.glob("10_*.py")} | {"9_ddp.py"}
