"""The tutorial's page shows lines and figures of the programs as they are."""

import difflib
import re

import pytest
from conftest import ROOT
from support.pages import blocks, command_of

FOLDER = ROOT / "tutorial"
PAGE = FOLDER / "README.md"
STEPS = sorted(path.stem for path in FOLDER.glob("[1-8]_*.py"))
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


def sections() -> dict[str, str]:
    """The text below each heading, by its first word: 1. for step 1."""
    parts = SECTION.split(PAGE.read_text())
    return {title.split()[0]: text for title, text in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.parametrize("step", STEPS)
def test_the_command_on_the_page_is_the_one_of_the_program(step: str) -> None:
    section = sections()[f"{step[0]}."]
    commands = re.findall(r"^```bash\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert [command.strip() for command in commands] == [command_of(FOLDER / f"{step}.py")]


def test_every_line_of_a_diff_on_the_page_is_one_of_the_diff_between_the_programs() -> None:
    shown = [(given, content) for language, given, content in blocks(PAGE) if language == "diff"]
    assert {given["to"] for given, _ in shown} == {f"{step}.py" for step in STEPS[1:]}
    for given, content in shown:
        old, new = ((FOLDER / given[key]).read_text().splitlines() for key in ("from", "to"))
        changed = {line for line in difflib.ndiff(old, new) if line[0] in "+-"}
        for line in content.splitlines():
            assert f"{line[0]} {line[1:]}" in changed, f"{given}: {line}"
