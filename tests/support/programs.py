"""The programs of the tutorial, run as their docstrings say."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from conftest import ROOT

from mingpt.tools.jobs import clean_environment, free_port

COMMAND = re.compile(r"^    ((?:python|torchrun) .*)$", re.MULTILINE)
TIMEOUT_S = 180  # beside other tests on two cores; alone a program takes 2 to 20 s


def command_of(path: Path) -> str:
    """The one command that a program's docstring gives."""
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
    commands = COMMAND.findall(docstring)
    assert len(commands) == 1, path
    return str(commands[0])


def run_program(command: str, folder: Path) -> str:
    """What a program prints, run in a folder that looks like the root. Raises AssertionError if it fails."""
    for name in ("mingpt", "tutorial", "data"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    command = command.replace("29400", str(free_port()))
    command = command.replace("torchrun --", f"{sys.executable} -m torch.distributed.run --")
    command = re.sub("^python", sys.executable, command)
    done = subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
