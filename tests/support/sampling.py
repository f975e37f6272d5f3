"""sample.py in this process, which has imported torch already."""

import contextlib
import io
import subprocess
import sys
from unittest import mock

import sample as program


def sample(*words: object) -> subprocess.CompletedProcess[str]:
    """What `python sample.py words...` prints, and its exit code."""
    line = ["sample.py", *map(str, words)]
    out, err = io.StringIO(), io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with mock.patch.object(sys, "argv", line), streams[0], streams[1]:
        code = program.main()
    return subprocess.CompletedProcess(line, code, out.getvalue(), err.getvalue())
