"""Every command of README.md and docs/extending.md runs, shortened by overrides.

The installs are run by .ci/run.
"""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from support.pages import apply_additions, commands, halves_of_the_readme, run, run_all

from mingpt.tools.jobs import ROOT, clean_environment


@pytest.mark.slow
def test_the_commands_of_the_readme_that_start_jobs_run(text: Path, tmp_path: Path) -> None:
    """The commands after them are in test_readme.py, so that two processes share them."""
    lines, _ = halves_of_the_readme()
    assert len(lines) > 8
    run_all(lines, text, tmp_path)
    assert (tmp_path / "out/default/loss.png").exists()


@pytest.mark.slow
def test_the_commands_of_pages_that_are_marked_run(text: Path, tmp_path: Path) -> None:
    lines = [
        line for name in ("scale", "clusters", "tuning") for line in commands(ROOT / f"docs/{name}.md", True)
    ]
    assert len(lines) > 4
    run_all(lines, text, tmp_path)


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "*.egg-info", "out")
    tree = shutil.copytree(ROOT, tmp_path / "extended", ignore=ignored)
    apply_additions(tree)
    return tree


def check(tree: Path, *commands: str) -> None:
    for command in commands:
        words = [sys.executable, *command.split()]
        done = subprocess.run(words, cwd=tree, capture_output=True, text=True, env=clean_environment())
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"


@pytest.mark.slow
def test_the_additions_of_the_page_on_extending_pass_the_quick_checks(extended: Path) -> None:
    named = "tests/test_house.py tests/config tests/optim/test_optimizer.py tests/report/test_run_logger.py"
    check(extended, "-m ruff check .", "-m ruff format --check .", ".ci/house.py", f"-m pytest -n 0 {named}")


@pytest.mark.weekly
def test_the_additions_of_the_page_on_extending_pass_all_checks(extended: Path) -> None:
    check(extended, "-m mypy", "-m pytest")


@pytest.mark.weekly
def test_the_additions_of_the_page_on_extending_work_as_they_stand(text: Path, extended: Path) -> None:
    for line in commands(ROOT / "docs" / "extending.md"):
        run(line, text, extended)
    out = extended / "out"
    assert '"steps_per_s"' in (out / "wsd" / "metrics.jsonl").read_text()
    assert len((out / "wsd" / "speed.csv").read_text().splitlines()) == 2
    settings = {"gqa": "arch", "wsd": "schedule"}
    for name, key in settings.items():
        assert f'"{key}": "{name}' in (out / name / "snapshots" / "step_00000002.json").read_text()


def requirements(name: str) -> list[str]:
    return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]


def test_requirements_and_pyproject_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements("requirements.txt") == project["dependencies"]
    extras = project["optional-dependencies"]
    assert set(extras) == {"tensorboard", "tokenizers", "hf", "s3"}
    first, *development = requirements("requirements-dev.txt")
    assert first == "-r requirements.txt"
    pinned = {re.split(r"[\[>=]", line)[0]: line for line in development}
    optional = {re.split(r"[\[>=]", line)[0]: line for extra in extras.values() for line in extra}
    shared = pinned.keys() & optional.keys()
    assert {name: pinned[name] for name in shared} == {name: optional[name] for name in shared}
