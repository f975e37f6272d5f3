"""Runs sample.py in this process, which has already imported torch."""

import contextlib
import io
import subprocess

from mingpt.base.command import run_command
from mingpt.tools import sample as program


def sample(*words: object) -> subprocess.CompletedProcess[str]:
    """Run `python sample.py words...`; return its output and its exit code."""
    line = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(program.main, line)
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())
