"""The pages lead to files, headings and commands that are there."""

from pathlib import Path

import pytest
from support.links import wrong_statements
from support.pages import blocks

from mingpt.tools.jobs import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "configs" / "README.md",
    ROOT / "data" / "README.md",
    *sorted((ROOT / "tutorial").rglob("*.md")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    added = {attributes["file"] for _, attributes, _ in blocks(page) if "file" in attributes}
    assert wrong_statements(page, ROOT, added) == []
