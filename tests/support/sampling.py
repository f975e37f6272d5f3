"""sample.py, run in this process, which has imported torch already."""

import contextlib
import io
import subprocess

import sample as program
from mingpt.base.command import run_command


def sample(*words: object) -> subprocess.CompletedProcess[str]:
    """The output and the exit code of `python sample.py words...`."""
    line = [str(word) for word in words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(program.main, line)
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())
