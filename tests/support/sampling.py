"""Runs sample.py in this process, which has already imported torch."""

import subprocess

from mingpt.tools import sample as program
from support.commands import run_here


def sample(*words: object) -> subprocess.CompletedProcess[str]:
    return run_here(program.main, *words)
