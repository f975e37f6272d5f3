"""Runs commands in this process: a new process would take seconds to import torch."""

import contextlib
import io
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mingpt.base.command import run_command
from mingpt.base.errors import UserError
from mingpt.tools import sample as program


def run_here(main: Callable[[Sequence[str]], int], *words: object) -> subprocess.CompletedProcess[str]:
    out, err = io.StringIO(), io.StringIO()
    handler = signal.getsignal(signal.SIGINT)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(main, [str(word) for word in words])
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)  # which a command may reset
    return subprocess.CompletedProcess([], code, out.getvalue(), err.getvalue())


def refused(main: Callable[[Sequence[str]], int], *words: object) -> str:
    """Return the command's stderr. Asserts exit code 2, and one line that begins with "error: "."""
    done = run_here(main, *words)
    assert (done.returncode, done.stdout) == (2, ""), (done.returncode, done.stdout, done.stderr[-3000:])
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def refusal(function: Callable[..., object], *words: Any) -> str:
    with pytest.raises(UserError) as caught:
        function(*words)
    (line,) = str(caught.value).splitlines()
    return line


def sample(*words: object) -> subprocess.CompletedProcess[str]:
    return run_here(program.main, *words)
