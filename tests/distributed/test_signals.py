"""The listening thread acts on signals: each test runs a process whose main thread sleeps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.jobs import ROOT, need

from mingpt.distributed.exit import before_first_step

# This program prints "ready" when it listens, and `reason` whenever that changes; it ends after 20 s.
PROGRAM = """
import os, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from mingpt.distributed import Launch, ProcessExit, signals
from mingpt.distributed.signals import SignalListener

signals.UNKNOWN_GRACE_S = 0.5
launch = Launch(world_size={workers}, agent_pid={agent}, master_addr="localhost")
listener = SignalListener(launch, ProcessExit(launch))
store = SimpleNamespace(
    read_exit_reason=lambda rank: {end}, record_exit_reason=lambda rank, reason: None, is_restart=bool
)
listener.exit.join(store, timeout_s=0.5)
{code}
print("ready", flush=True)
{then}
reason = None
for _ in range(2000):
    if listener.reason != reason:
        reason = listener.reason
        print(reason, flush=True)
    time.sleep(0.01)
sys.exit(77)
"""
PEER = "listener.siblings = {1: os.pidfd_open(subprocess.Popen(['sleep', '0.2']).pid)}"
WATCH = "listener.watch_stop_file(Path(sys.argv[1]))"


def listen(
    folder: Path,
    code: str = "",
    workers: int = 2,
    end: str = "(False, None)",
    agent: str = "None",
    then: str = "",
) -> subprocess.Popen[str]:
    """Start the process, whose argument is the path STOP in `folder`; returns when the process listens."""
    if PEER in code:
        need(os, "pidfd_open")
    program = PROGRAM.format(code=code, workers=workers, end=end, agent=agent, then=then)
    words = [sys.executable, "-c", program, str(folder / "STOP")]
    process = subprocess.Popen(words, stdout=-1, stderr=-1, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        said = process.communicate(timeout=10)[1]
    finally:
        process.kill()
    return process.returncode, said


HANG = "os.path.exists = lambda path: time.sleep(60)\n" + WATCH
AGENT = {"agent": "os.getppid()"}


@pytest.mark.parametrize(
    ("kind", "how", "code"),
    [
        ("SIGUSR1", {"workers": 1}, 0),
        ("SIGTERM", {"workers": 1}, 0),
        ("SIGTERM", AGENT, 143),
        ("SIGQUIT", AGENT, 131),
        ("SIGTERM", {"code": HANG, **AGENT}, 143),
    ],
)
def test_before_the_run_a_signal_ends_the_process_at_once_also_while_the_disk_hangs(
    kind: str, how: dict[str, Any], code: int, tmp_path: Path
) -> None:
    process = listen(tmp_path, **how)
    process.send_signal(getattr(signal, kind))
    # Under an agent, workers do not know whether the job was told to stop or only this generation.
    assert ended(process) == (code, "" if code else before_first_step(kind))


def test_without_progress_sigterm_ends_the_process_after_timeout_s(tmp_path: Path) -> None:
    process, began = listen(tmp_path, "listener.defer()"), time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 143 and time.monotonic() - began > 0.5


NCCL = """
from types import SimpleNamespace as S
listener.exit.nccl = S(waited_s=lambda: {}, backend=S(get_error=lambda: S(name='{}')))
"""
ORPHAN = "launch = Launch(world_size=2, agent_pid=os.getppid() + 1, master_addr='localhost')"
NOTICES = "listener.exit.launch = listener.launch = launch"
LEAVES = "listener.exit.launch = launch\nlistener.exit.exit_process(RuntimeError('Connection closed'))"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"code": NCCL.format(0.6, "SUCCESS")}, "timed out waiting for a peer after 0.5 s"),
        ({"code": NCCL.format(0, "COMM_ERROR")}, "NCCL: remote process exited or there was a network error"),
        ({"code": PEER, "end": "(True, None)"}, "lost a peer"),  # it was killed
        ({"code": PEER}, "lost a peer"),  # the store does not answer for too long
        (
            {"code": ORPHAN, "then": "listener.exit.launch = listener.launch = launch"},
            "was lost after step 0",
        ),
        ({"code": ORPHAN, "then": LEAVES}, "was lost after step 0"),
    ],
)
def test_a_lost_peer_or_agent_ends_the_process_though_its_main_thread_waits(
    how: dict[str, Any], said: str, tmp_path: Path
) -> None:
    code, shown = ended(listen(tmp_path, **how))
    assert code == 1 and said in shown and len(shown.splitlines()) == 1, shown


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (NCCL.format(0.4, "SUCCESS"), "(False, None)"),
        (PEER, "(True, {'why': 'finished'})"),
        (PEER, "(True, {'why': 'told to stop by SIGTERM'})"),
        (f"{PEER}\nlistener.exit.exiting.acquire()", "(True, None)"),  # another thread is exiting
    ],
)
def test_a_short_wait_or_a_peer_that_left_in_order_does_not_nor_one_during_an_exit(
    code: str, end: str, tmp_path: Path
) -> None:
    process = listen(tmp_path, code, end=end)
    time.sleep(1.5)
    assert process.poll() is None
    process.kill()
    process.communicate()
