"""Runs the commands of documentation pages, shortened, and the programs of the tutorial."""

import ast
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from support.jobs import ROOT, SMALL, clean_environment, free_port

BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORT = {key: value for key, value in SMALL.items() if key not in ("data.block_size", "snapshot.every")}
SHORT |= {"data.block_size": 16, "data.sha256": "null", "trainer.max_steps": 2}
SHORT |= {"trainer.compile": False}  # tests/jobs/test_compiled_jobs.py tests whole jobs that compile
COMMAND = re.compile(r"^    ((?:[A-Z_]+=\S+ )?(?:python|torchrun) .*)$", re.MULTILINE)
PROGRAMS = {
    "python": sys.executable,
    "pip": f"{sys.executable} -m pip",
    "torchrun": f"{sys.executable} -m torch.distributed.run",
}
TIMEOUT_S = 180  # enough beside other tests on two cores; alone a program takes 2 to 20 s
NEEDED = (
    "train.py",
    "sample.py",
    "mingpt",
    "anynode",
    "configs",
    "data",
    "docs",
    "launch",
    "gpt2_train_cfg.yaml",
    "README.md",
)


def blocks(page: Path) -> list[tuple[str, dict[str, str], str]]:
    found = []
    for language, attributes, content in BLOCK.findall(page.read_text()):
        words = [word.split("=", 1) for word in attributes.split()]
        found.append((language, dict(words), content))
    return found


def commands(page: Path, marked: bool = False) -> list[str]:
    return [
        line
        for language, attributes, content in blocks(page)
        if language == "bash" and ("test" in attributes or not marked)
        for line in content.splitlines()
    ]


def apply_additions(tree: Path) -> None:
    """Apply the blocks of docs/extending.md to `tree`, a copy of the project.

    A block with `line=FILE` goes before the first import of mingpt in FILE, and one with `file=FILE` is a new
    file. The second line of a diff replaces the first line in FILE.
    """
    for language, attributes, content in blocks(ROOT / "docs" / "extending.md"):
        if "line" in attributes:
            path = tree / attributes["line"]
            text = re.sub(
                r"^(?=(from|import) mingpt)", content, path.read_text(), count=1, flags=re.MULTILINE
            )
            path.write_text(text)
        elif language == "diff":
            path = tree / attributes["file"]
            old, new = (line[1:] for line in content.splitlines())
            assert path.read_text().count(old) == 1
            path.write_text(path.read_text().replace(old, new))
        elif "file" in attributes:
            path = tree / attributes["file"]
            assert not path.exists()
            path.write_text(content)


def halves_of_the_readme() -> tuple[list[str], list[str]]:
    """README.md's commands in two lists; the second list begins with `python train.py --help`."""
    lines = commands(ROOT / "README.md")
    middle = lines.index("python train.py --help")
    return lines[:middle], lines[middle:]


def shorten(line: str, text: Path, more: dict[str, object]) -> list[str]:
    """Return the commands of a line, changed so that they take only seconds."""
    line, _, remark = line.partition("#")
    line = re.sub(r"^for (\w+) in (\S+) .*; do (.*); done$", r"\1=\2; \3", line)
    words = line.split("&&")[-1].split()
    if words[0] == "pytest":
        return []  # the line runs these tests themselves
    if {"mingpt", "verify"} <= set(words):
        words += ["--kills", "1", "--workers", "1"]
    if "train.py" in words and not {"--help", "--print_config"} & set(words):
        given = {word.partition("=")[0] for word in words}
        short = SHORT | more | ({} if "data.path" in given else {"data.path": text})
        words += [f"{key}={value}" for key, value in short.items() if key not in given]
        words = [re.sub(r"max_steps=\d{2,}", "max_steps=3", word) for word in words]
    elif "sample.py" in words:
        words = [re.sub("^300$", "20", word) for word in words]
    elif words[0] == "sha256sum":
        words = [word.replace("00000340", "00000002") for word in words]
    return [" ".join(words)] * (2 if "on both nodes" in remark or "on all nodes" in remark else 1)


def run_all(lines: Sequence[str], text: Path, folder: Path, **more: object) -> None:
    """Link NEEDED into `folder`, and `run` the lines there in order: later lines use earlier results."""
    for name in NEEDED:
        (folder / name).symlink_to(ROOT / name)
    for line in lines:
        run(line, text, folder, **more)


def run(line: str, text: Path, folder: Path, **more: object) -> None:
    """Run the commands that `shorten` makes of a line at once, as on several nodes."""
    settings = {key.replace("__", "."): value for key, value in more.items()}
    port, running = free_port(), []
    for node, command in enumerate(shorten(line, text, settings)):
        addresses = {"A": "127.0.0.1", "B": "127.0.0.2", "C": "127.0.0.3", "ADDRESS": f"127.0.0.{node + 1}"}
        running.append(start(command, folder, port, HOST="localhost", NODE=str(node), **addresses))
    failures = [failure for process in running if (failure := wait_for(process)[1])]
    assert not failures, "\n".join(failures)


def start(command: str, folder: Path, port: int, **variables: str) -> subprocess.Popen[str]:
    words = [PROGRAMS.get(word, word) for word in command.replace("29400", str(port)).split()]
    return subprocess.Popen(
        " ".join(words),
        shell=True,
        cwd=folder,
        env=clean_environment(PYTHONUNBUFFERED="", **variables),  # else two processes' lines may mix
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_for(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Return what the process printed, and why it failed: "" if it did not.

    After TIMEOUT_S it gets SIGTERM. Exit code 1 of `mingpt compare` with an empty stderr is no failure: it
    has found a difference.
    """
    late = ""
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        late = f"after {TIMEOUT_S} s still running: " if process.poll() is None else "its pipes stayed open: "
        os.killpg(process.pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    differs = "-m mingpt compare" in str(process.args) and (process.returncode, err) == (1, "")
    if not late and (differs or process.returncode == 0):
        return out, ""
    return out, f"{late}{process.args!r} ended with {process.returncode}\n{out[-2000:]}\n{err[-4000:]}"


def finish(process: subprocess.Popen[str]) -> str:
    out, failure = wait_for(process)
    assert not failure, failure
    return out


def not_printed(shown: str, printed: str) -> list[str]:
    """The lines of a page's block that a program has not printed, apart from those that are "...".

    The number after "about" may be any, and decimals may differ by 0.0001: processors add differently.
    """
    lines = [_decimals_apart(line) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        words, values = _decimals_apart(line)
        found = [others for same_words, others in lines if same_words == words]
        if line != "..." and not any(values == pytest.approx(others, abs=1e-4) for others in found):
            missing.append(line)
    return missing


def _decimals_apart(line: str) -> tuple[str, list[float]]:
    """A line without its decimals and what stands for a number after "about"; and the decimals."""
    line = re.sub(r"about [\d,]+", "about", line)
    return re.sub(r"\d+\.\d+", "#", line), [float(value) for value in re.findall(r"\d+\.\d+", line)]


def command_of(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    commands = COMMAND.findall(docstring)
    assert len(commands) == 1, path
    return str(commands[0])


def link_root(folder: Path) -> None:
    for name in ("mingpt", "tutorial", "data"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)


def run_program(command: str, folder: Path) -> str:
    link_root(folder)
    return finish(start(command, folder, free_port()))
