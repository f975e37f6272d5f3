"""The pages lead to files and headings that are there; and the checker finds those that are not."""

from pathlib import Path

import pytest
from support.links import anchors, wrong_statements
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


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With a page, two programs, and a picture."""
    for folder in ("docs", "mingpt/parallel", "tutorial/pictures"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs" / "faults.md").write_text("# Faults\n\n## A node is cut off\n")
    (tmp_path / "mingpt" / "parallel" / "exact.py").write_text("pass\n")
    (tmp_path / "mingpt" / "trainer.py").write_text("pass\n")
    (tmp_path / "tutorial" / "pictures" / "nodes.svg").write_text("<svg/>")
    return tmp_path


def statements(repository: Path, text: str) -> list[str]:
    page = repository / "tutorial" / "README.md"
    page.write_text(text)
    return wrong_statements(page, repository, {"mingpt/added.py"})


@pytest.mark.parametrize(
    "text",
    [
        "[file](../docs/faults.md), [below](../docs/faults.md#a-node-is-cut-off), [up](#step-1-one-process)",
        "[from the root](/docs/faults.md), [away](https://pytorch.org/x#y), [a folder](../mingpt)",
        '![two nodes](pictures/nodes.svg) [![x](pictures/nodes.svg)](../docs/faults.md "Faults")',
        "`mingpt/trainer.py`, `mingpt/`, `mingpt/parallel/`, `exact.py`, `parallel/exact.py`, `mingpt/*.py`",
        "`mingpt/added.py` is yours; so is `out/four`; `a/b` is a fraction; `x.py y.py` a command",
        "```\n[in a block](nowhere.md) `mingpt/nothing.py`\n```\n<!-- [not shown](nowhere.md) -->",
    ],
)
def test_what_is_there_is_accepted(repository: Path, text: str) -> None:
    assert statements(repository, f"# Step 1: one process\n\n{text}\n") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](../docs/fault.md)", "../docs/fault.md: no such file in the repository"),
        ("[a](../../elsewhere.md)", "../../elsewhere.md: no such file in the repository"),
        ("![a](picture/nodes.svg)", "picture/nodes.svg: no such file in the repository"),
        ("[![a](no.svg)](../docs/faults.md)", "no.svg: no such file in the repository"),
        ("[![a](pictures/nodes.svg)](no.md)", "no.md: no such file in the repository"),
        ("[`code`](no.md)", "no.md: no such file in the repository"),
        ("[a](../docs/faults.md#node)", "../docs/faults.md#node: no such heading"),
        ("[a](#Step-1)", "#Step-1: no such heading"),
        ("[a](../mingpt/trainer.py#step)", "../mingpt/trainer.py#step: no such heading"),
        ("`mingpt/train.py`", "`mingpt/train.py`: no such file or folder"),
        ("`mingpt/elastic/`", "`mingpt/elastic/`: no such file or folder"),
        ("`docs/*.txt`", "`docs/*.txt`: no such file or folder"),
        ("`1_single.py`", "`1_single.py`: no such file"),
        ("`parallel/trainer.py`", "`parallel/trainer.py`: no such file"),
    ],
)
def test_what_is_not_there_is_found(repository: Path, text: str, expected: str) -> None:
    assert statements(repository, f"# Step 1\n\n{text}\n") == [expected]


def test_headings_are_spelled_as_github_does() -> None:
    page = """
# Step 2: `mp.spawn`, two ranks!
## What ends it? (in words)
## [A link](x.md) and **bold** & snake_case
### Same ###
### Same
## Größe
```bash
# a comment
```
"""
    assert anchors(page) == {
        "step-2-mpspawn-two-ranks",
        "what-ends-it-in-words",
        "a-link-and-bold--snake_case",
        "same",
        "same-1",
        "größe",
    }
