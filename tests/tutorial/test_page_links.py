"""The pages lead to files and headings that are there."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from support.pages import blocks

from mingpt.tools.jobs import ROOT

FENCED = re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
HEADING = re.compile(r"^ {0,3}#{1,6}[ \t]+(.*?)[ \t]*#*[ \t]*$", re.MULTILINE)
TARGET = re.compile(
    r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)"
)  # [text](target), ![text](target "title")
CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FOLDERS = ("benchmarks", "configs", "data", "docs", "launch", "mingpt", "tests", "tutorial")
SUFFIXES = (".py", ".yaml", ".sbatch", ".sh", ".txt", ".md", ".svg")


def wrong_link(target: str, page: Path) -> str:
    if re.match(r"[a-z][a-z0-9+.-]*:|//", target):
        return ""  # a link to another site
    path, _, anchor = unquote(target).partition("#")
    base = ROOT if path.startswith("/") else page.parent
    file = (base / path.lstrip("/")).resolve() if path else page.resolve()
    if not file.exists() or not file.is_relative_to(ROOT.resolve()):
        return f"{target}: no such file in the repository"
    is_there = not anchor or (file.suffix == ".md" and anchor in anchors(file.read_text()))
    return "" if is_there else f"{target}: no such heading"


def anchors(text: str) -> set[str]:
    found: list[str] = []
    for heading in HEADING.findall(COMMENT.sub("", FENCED.sub("", text))):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        found.append(re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-"))
    again = {f"{slug}-{number}" for slug in found for number in range(1, found.count(slug))}
    return {*found, *again}


def wrong_path(name: str) -> str:
    """An error text if a file or folder that the page names in backticks is missing.

    A path whose first part is one of FOLDERS starts at ROOT. Any other path that ends in one of SUFFIXES,
    and any name that ends in .py, may be anywhere below ROOT. Other names are no paths.
    """
    if not re.fullmatch(r"[\w.*-]+(/[\w.*-]+)*/?", name):
        return ""
    if "/" in name and name.split("/")[0] in FOLDERS:
        return "" if list(ROOT.glob(name)) else f"`{name}`: no such file or folder"
    is_file = name.endswith(".py") or ("/" in name and name.endswith(SUFFIXES))
    return f"`{name}`: no such file" if is_file and not list(ROOT.rglob(name)) else ""


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
    prose = COMMENT.sub("", FENCED.sub("", page.read_text()))
    errors = [wrong_link(target, page) for target in TARGET.findall(prose)]
    errors += [wrong_path(name) for name in CODE.findall(prose) if name not in added]
    assert [error for error in errors if error] == []
