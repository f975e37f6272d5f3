"""The page shows lines and figures of the programs as they are; the pictures can be drawn again."""

import difflib
import json
import re
from pathlib import Path

import pytest
from support.pages import blocks, command_of

from mingpt.tools.jobs import ROOT
from tutorial import pictures
from tutorial.timeline import draw

FOLDER = ROOT / "tutorial"
PAGE = FOLDER / "README.md"
LESSONS = sorted(path.stem for path in FOLDER.glob("[1-8]_*.py"))
SECTION = re.compile(r"^## (.*)$", re.MULTILINE)


def sections() -> list[str]:
    """The text below each heading of a lesson: two for lesson 2."""
    parts = SECTION.split(PAGE.read_text())
    return [text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title[0].isdigit()]


def test_every_section_has_the_command_of_its_program_and_a_question() -> None:
    found = [re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for text in sections()]
    expected = [command_of(FOLDER / f"{lesson}.py") for lesson in LESSONS]
    assert sorted(command.strip() for commands in found for command in commands) == sorted(expected)
    assert {len(commands) for commands in found} == {1}
    assert {text.count("**Predict, change, run.**") for text in sections()} == {1}


def test_every_line_of_a_diff_on_the_page_is_one_of_the_diff_between_the_programs() -> None:
    shown = [(given, content) for language, given, content in blocks(PAGE) if language == "diff"]
    assert {given["to"] for given, _ in shown} == {f"{lesson}.py" for lesson in LESSONS} - {
        "1_single.py",
        "2_spawn.py",
    }
    for given, content in shown:
        old, new = ((FOLDER / given[key]).read_text().splitlines() for key in ("from", "to"))
        changed = {line for line in difflib.ndiff(old, new) if line[0] in "+-"}
        for line in content.splitlines():
            assert f"{line[0]} {line[1:]}" in changed, f"{given}: {line}"


def test_the_committed_pictures_are_what_the_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # the tutorial's programs read data/input.txt
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main()
    committed = {path.name: path.read_bytes() for path in FOLDER.glob("pictures/*.svg")}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == committed


@pytest.mark.parametrize("path", sorted(FOLDER.glob("pictures/events/*.json")), ids=lambda path: path.stem)
def test_a_committed_picture_is_what_its_events_give(path: Path) -> None:
    content = json.loads(path.read_text())
    picture = draw(content["title"], content["events"]).svg()
    assert picture.encode() == path.with_suffix(".svg").read_bytes()
