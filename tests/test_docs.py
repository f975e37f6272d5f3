"""Every command of README.md and docs/extending.md runs, shortened by overrides.

The installs are run by .ci/run.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from conftest import ROOT
from support.pages import blocks, commands, halves_of_the_readme, run, run_all


@pytest.mark.slow
def test_the_commands_of_the_readme_that_start_jobs_run(text: Path, tmp_path: Path) -> None:
    """The commands after them are in test_readme.py, so that two processes share them."""
    lines, _ = halves_of_the_readme()
    assert len(lines) > 8
    run_all(lines, text, tmp_path)
    assert (tmp_path / "out/default/loss.png").exists()


@pytest.mark.slow
def test_the_commands_of_pages_that_are_marked_run(text: Path, tmp_path: Path) -> None:
    lines = [line for name in ("scale", "clusters") for line in commands(ROOT / f"docs/{name}.md", True)]
    assert len(lines) > 4
    run_all(lines, text, tmp_path)


@pytest.mark.weekly
def test_the_additions_of_the_page_on_extending_work_as_they_stand(text: Path, tmp_path: Path) -> None:
    """The additions are applied to a copy: new files, one import line each, and the page of settings."""
    for name in ("train.py", "sample.py", "gpt2_train_cfg.yaml"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "mingpt", tmp_path / "mingpt", ignore=shutil.ignore_patterns("__pycache__"))
    lines_added: dict[str, int] = {}
    for language, attributes, content in blocks(ROOT / "docs" / "extending.md"):
        if "line" in attributes:
            path = tmp_path / attributes["line"]
            docstring, imports = path.read_text().split('"""\n\n', 1)
            path.write_text(f'{docstring}"""\n\n{content}{imports}')
            lines_added[content] = len(content.splitlines())
        elif language == "diff":
            assert attributes["file"] == "mingpt/config/settings.py"
            path = tmp_path / attributes["file"]
            old, new = (line[1:] for line in content.splitlines())
            assert path.read_text().count(old) == 1
            path.write_text(path.read_text().replace(old, new))
        elif "file" in attributes:
            path = tmp_path / attributes["file"]
            assert not path.exists()
            path.write_text(content)
    assert len(lines_added) == 5 and set(lines_added.values()) == {1}
    for line in commands(ROOT / "docs" / "extending.md"):
        run(line, text, tmp_path)
    out = tmp_path / "out"
    assert '"steps_per_minute"' in (out / "metric" / "metrics.jsonl").read_text()
    assert len((out / "sink" / "losses.csv").read_text().splitlines()) == 2
    assert '"vocabulary": "bytes"' in (out / "byte" / "snapshots" / "step_00000002.json").read_text()
    assert '"reduction": "plain"' in (out / "plain" / "snapshots" / "step_00000002.json").read_text()
    assert '"schedule": "wsd"' in (out / "wsd" / "snapshots" / "step_00000002.json").read_text()


def test_every_room_is_on_the_tour() -> None:
    """Files that pages name are checked in tests/tutorial/test_page_links.py."""
    tour = (ROOT / "README.md").read_text()
    rooms = [path for path in (ROOT / "mingpt").iterdir() if path.name not in ("__init__.py", "__pycache__")]
    assert [
        path.name for path in rooms if f"`mingpt/{path.name}{'/' if path.is_dir() else ''}`" not in tour
    ] == []
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_table_of_presets_is_made_from_the_configurations() -> None:
    command = [sys.executable, "benchmarks/table.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout in (ROOT / "configs" / "README.md").read_text()


def test_a_result_is_short() -> None:
    page = (ROOT / "docs" / "RESULTS.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in row.split("|") if len(cell.split()) > 25] == []


def requirements(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def test_requirements_and_pyproject_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements("requirements.txt") == project["dependencies"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"tensorboard", "tokenizers", "hf", "s3"}
    development = requirements("requirements-dev.txt")
    assert development[0] == "-r requirements.txt"
    pinned = {re.split(r"[\[>=]", line)[0]: line for line in development}
    for line in [line for extra in extras.values() for line in extra]:
        name = re.split(r"[\[>=]", line)[0]
        assert pinned.get(name, line) == line
