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

from conftest import ROOT, SMALL

from mingpt.jobs import clean_environment, free_port

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = {key: value for key, value in SMALL.items() if key not in ("data.block_size", "snapshot.every")}
SHORT |= {"data.block_size": 16, "data.sha256": "null", "trainer.max_steps": 2}


def blocks(page: Path) -> list[tuple[str, dict[str, str], str]]:
    """(language, attributes such as file=..., content) of every fenced block that names a language."""
    found = []
    for language, attributes, content in BLOCK.findall(page.read_text()):
        words = [word.split("=", 1) for word in attributes.split()]
        found.append((language, dict(words), content))
    return found


def commands(page: Path) -> list[str]:
    return [
        line for language, _, content in blocks(page) if language == "bash" for line in content.splitlines()
    ]


def shorten(line: str, text: Path) -> list[str]:
    """The commands of a line, one for each node; settings that the page itself gives are kept."""
    line, _, remark = line.partition("#")
    words = line.split("&&")[-1].split()
    if words[0] == "pytest":
        return []  # this is it
    if "mingpt.verify" in words:
        words += ["--kills", "1", "--workers", "1"]
    if "train.py" in words and not {"--help", "--print_config"} & set(words):
        given = {word.partition("=")[0] for word in words}
        short = SHORT | ({} if "data.path" in given else {"data.path": text})
        words += [f"{key}={value}" for key, value in short.items() if key not in given]
        words = [re.sub(r"max_steps=\d{2,}", "max_steps=3", word) for word in words]
    elif "sample.py" in words:
        words = [re.sub("^300$", "20", word) for word in words]
    programs = {"torchrun": f"{sys.executable} -m torch.distributed.run", "python": sys.executable}
    words = [programs.get(word, word) for word in words]
    return [" ".join(words)] * (2 if "on both nodes" in remark or "on all nodes" in remark else 1)


def run(line: str, text: Path, folder: Path) -> None:
    """All commands of a line at once, as on several nodes."""
    port = str(free_port())
    running = []
    for node, command in enumerate(shorten(line, text)):
        addresses = {"A": "127.0.0.1", "B": "127.0.0.2", "C": "127.0.0.3", "ADDRESS": f"127.0.0.{node + 1}"}
        env = clean_environment(HOST="localhost", NODE=str(node), **addresses)
        process = subprocess.Popen(
            command.replace("29400", port),
            shell=True,
            cwd=folder,
            text=True,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        running.append(process)
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, f"{line}\n{out[-2000:]}\n{err[-3000:]}"


def test_every_command_of_the_readme_runs(text: Path, tmp_path: Path) -> None:
    """In the order of the page, in one folder, since later commands use what earlier ones wrote."""
    lines = commands(ROOT / "README.md")
    assert len(lines) > 12
    for name in (
        "train.py",
        "sample.py",
        "mingpt",
        "configs",
        "data",
        "docs",
        "launch",
        "gpt2_train_cfg.yaml",
        "README.md",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    for line in lines:
        run(line, text, tmp_path)
    assert (tmp_path / "out/default/loss.png").exists()


def test_the_additions_of_the_page_on_extending_work_as_they_stand(text: Path, tmp_path: Path) -> None:
    """Applied to a copy: new files, one import line each, and the page of settings."""
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
            assert attributes["file"] == "mingpt/config.py"
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


def test_every_file_that_a_page_names_is_there_and_every_room_is_on_the_tour() -> None:
    for page in PAGES:
        named = set(re.findall(r"`([\w/]+\.(?:py|yaml|sbatch|txt|md))`", page.read_text()))
        in_root = {name for name in named if "/" in name or name.endswith(".py")}
        added = {attributes.get("file") for _, attributes, _ in blocks(page)}
        missing = [name for name in in_root - added if not list(ROOT.rglob(name))]
        assert missing == [], page
    tour = (ROOT / "README.md").read_text()
    rooms = [path for path in (ROOT / "mingpt").iterdir() if path.name not in ("__init__.py", "__pycache__")]
    assert [
        path.name for path in rooms if f"`mingpt/{path.name}{'/' if path.is_dir() else ''}`" not in tour
    ] == []
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_table_of_speeds_is_the_one_made_from_the_results() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/table.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout in (ROOT / "docs" / "RESULTS.md").read_text()


def test_the_costs_of_the_presets_are_the_ones_computed_from_them() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/presets.py"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout in (ROOT / "configs" / "README.md").read_text()


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
