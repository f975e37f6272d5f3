"""Processes of workers that import torch while the agent of `python train.py` does, not after it has.

The agent starts them before it imports torch itself. Each imports what every worker needs, and waits to be
told its environment; then it runs the program, as Python does that is started with it.
"""

import contextlib
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SOCKET = "MINGPT_PRESTART_SOCKET"  # the file descriptor by which a process is told its environment


class PrestartedWorkers:
    """`count` processes for `python *command`. They end with this process, unless they were taken."""

    def __init__(self, count: int, command: Sequence[str], blocked: Sequence[signal.Signals]) -> None:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # the processes inherit this mask
        try:
            self.waiting = [start(command) for _ in range(count)]
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def take(self, environment: dict[str, str]) -> subprocess.Popen[bytes] | None:
        """A process that goes on with this environment; None if there is none any more."""
        while self.waiting:
            process, channel = self.waiting.pop(0)
            with channel, contextlib.suppress(OSError):  # it has been killed
                channel.sendall(json.dumps(environment).encode())
                return process
        return None

    def close(self) -> None:
        """Have those end that nobody has taken."""
        for _, channel in self.waiting:
            channel.close()
        self.waiting = []

    def serve(self) -> None:
        """From here on torchrun's agent in this process takes these before it starts others."""
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        def popen(args: Sequence[str], env: dict[str, str], **options: Any) -> subprocess.Popen[bytes]:
            return self.take(env) or subprocess.Popen(args, env=env, **options)

        subprocess_handler.Popen = popen  # type: ignore[assignment, misc, attr-defined]


def start(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process that waits, and the socket by which to tell it its environment."""
    here, there = socket.socketpair()
    with there:
        process = subprocess.Popen(
            [sys.executable, __file__, *command],
            env={"OMP_NUM_THREADS": "1", **os.environ, SOCKET: str(there.fileno())},  # 1 as torchrun does
            pass_fds=[there.fileno()],
            start_new_session=True,  # as torchrun's agent does
        )
    return process, here


def import_what_workers_need() -> None:
    """Modules of this package and torch, wherever the program's own folder is."""
    home = str(Path(__file__).parent.parent)
    sys.path.insert(0, home)
    import mingpt.cli
    import mingpt.trainer  # noqa: F401

    sys.path.remove(home)


def read_environment() -> dict[str, str] | None:
    """What the agent says; None if it has ended."""
    with socket.socket(fileno=int(os.environ[SOCKET])) as channel, channel.makefile("rb") as file:
        content = file.read()
    environment: dict[str, str] | None = json.loads(content) if content else None
    return environment


def main() -> None:
    gc.disable()  # as in a Worker
    program = sys.argv[1]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(program).resolve().parent)
    import_what_workers_need()
    environment = read_environment()
    if environment is None:
        os._exit(0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = sys.argv[1:]
    runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
