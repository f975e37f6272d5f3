"""The listening thread acts on signals: each test runs a process whose main thread sleeps."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import ROOT
from support.needs import need

from mingpt.distributed.exit import before_first_step

# This program prints "ready" when it listens, and `reason` whenever that changes; it ends after 20 s.
PROGRAM = """
import os, subprocess, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from mingpt.distributed import Launch, ProcessExit, signals
from mingpt.distributed.signals import StopSignal

signals.UNKNOWN_GRACE_S = 0.5
launch = Launch(world_size={workers}, agent_pid={agent}, master_addr="localhost")
listener = StopSignal(launch, ProcessExit(launch))
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
KILLED = "(True, None)"
FAILED = "(True, {'why': 'failed (OSError: planted)'})"
WATCH = "listener.watch_stop_file(Path(sys.argv[1]))"


def listen(
    code: str = "",
    *arguments: str,
    workers: int = 2,
    end: str = "(False, None)",
    agent: str = "None",
    then: str = "",
) -> subprocess.Popen[str]:
    """Start the process; returns when the process listens."""
    if PEER in code:
        need(os, "pidfd_open")
    program = PROGRAM.format(code=code, workers=workers, end=end, agent=agent, then=then)
    words = [sys.executable, "-c", program, *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def code_of(process: subprocess.Popen[str], timeout_s: float = 10) -> int:
    try:
        return process.wait(timeout_s)
    finally:
        process.kill()


def test_alone_a_stop_file_ends_a_process_that_has_not_begun(tmp_path: Path) -> None:
    (tmp_path / "STOP").touch()
    process = listen(WATCH, str(tmp_path / "STOP"), workers=1)
    assert code_of(process) == 0 and not (tmp_path / "STOP").exists()
    assert process.stderr is not None and process.stderr.read() == before_first_step("STOP")


@pytest.mark.parametrize(
    ("kind", "workers", "agent", "code"),
    [
        ("SIGUSR1", 1, "None", 0),
        ("SIGUSR1", 1, "os.getppid()", 0),
        ("SIGTERM", 1, "None", 0),
        ("SIGHUP", 1, "None", 0),
        ("SIGTERM", 2, "os.getppid()", 143),
        ("SIGQUIT", 2, "os.getppid()", 131),
    ],
)
def test_before_the_run_a_signal_ends_the_process_at_once(
    kind: str, workers: int, agent: str, code: int
) -> None:
    process = listen(workers=workers, agent=agent)
    process.send_signal(getattr(signal, kind))
    assert code_of(process) == code
    assert process.stderr is not None
    # Under an agent, workers do not know whether the job was told to stop or only this generation.
    assert process.stderr.read() == ("" if code else before_first_step(kind))


@pytest.mark.parametrize(("kind", "code"), [("SIGUSR1", ""), ("SIGHUP", "listener.defer()")])
def test_a_request_waits_for_an_agreement_and_a_second_one_does_not(kind: str, code: str) -> None:
    process = listen(code + "\nlistener.exit.timeout_s = 60")
    process.send_signal(getattr(signal, kind))
    assert process.stdout is not None and process.stdout.readline() == f"{kind}\n"
    time.sleep(1.2)  # any sooner, both signals would count as one
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert code_of(process) == 130


def test_after_the_time_of_a_pause_a_signal_counts_as_the_first() -> None:
    then = "listener.pause_at = time.monotonic()"
    process = listen("listener.defer()\nlistener.exit.timeout_s = 60", then=then)
    assert process.stdout is not None and process.stdout.readline() == "trainer.pause_after\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "SIGTERM\n" and process.poll() is None
    process.kill()


HANG = "os.path.exists = lambda path: time.sleep(60)\n" + WATCH
# As a write to a disk that hangs: nobody reads the pipe, which is full.
STUCK_STACKS = """
from mingpt.distributed import exit
stacks = listener.exit.stacks = exit.StackFile(Path(sys.argv[1]), 0.1)
stacks.file = os.fdopen(os.pipe()[1], "wb", 0)
os.set_blocking(stacks.file.fileno(), False)
while stacks.file.write(bytes(4096)):
    pass
os.set_blocking(stacks.file.fileno(), True)
stacks.note_progress()
time.sleep(0.5)
"""


@pytest.mark.parametrize("code", [HANG, STUCK_STACKS])
def test_a_signal_ends_the_process_while_the_disk_hangs(code: str, tmp_path: Path) -> None:
    process = listen(code, str(tmp_path / "stacks" / "file"), agent="os.getppid()")
    process.send_signal(signal.SIGTERM)
    assert code_of(process) == 143


def test_only_the_listening_thread_takes_signals() -> None:
    """A main thread that waits for a disk in the kernel would take a signal without handling it."""
    process = listen(then="print(signals.signal.pthread_sigmask(0, ()), flush=True)")
    assert process.stdout is not None and "SIGTERM" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert code_of(process) in (0, 143)


def test_without_progress_sigterm_ends_the_process_after_timeout_s() -> None:
    process = listen("listener.defer()")
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert code_of(process) == 143 and time.monotonic() - began > 0.5


@pytest.mark.parametrize(
    ("waited_s", "error", "said"),
    [
        (0.6, "SUCCESS", "timed out waiting for a peer after 0.5 s"),
        (0.0, "COMM_ERROR", "NCCL: remote process exited or there was a network error"),
        (0.4, "SUCCESS", None),
    ],
)
def test_a_stuck_or_failed_collective_on_gpus_ends_the_process_though_its_main_thread_waits(
    waited_s: float, error: str, said: str | None
) -> None:
    watch = f"from types import SimpleNamespace as S\nbackend = S(get_error=lambda: S(name='{error}'))"
    process = listen(f"{watch}\nlistener.exit.nccl = S(waited_s=lambda: {waited_s}, backend=backend)")
    if said is None:
        time.sleep(1.0)
        assert process.poll() is None
        process.kill()
        process.wait()
    else:
        assert code_of(process) == 1
        assert process.stderr is not None and said in process.stderr.read()


@pytest.mark.parametrize("end", [KILLED, FAILED, "(False, None)"])
def test_a_peer_that_is_gone_without_an_orderly_reason_ends_the_process(end: str) -> None:
    """The last case: the store does not answer for longer than an orderly end could take."""
    process = listen(PEER, end=end)
    assert code_of(process) == 1
    assert process.stderr is not None and "lost a peer" in process.stderr.read()


@pytest.mark.parametrize(
    ("code", "end"),
    [
        ("", "(True, {'why': 'finished'})"),
        ("", "(True, {'why': 'told to stop by SIGTERM'})"),
        ("listener.exit.exiting.acquire()", KILLED),  # another thread is exiting
    ],
)
def test_a_peer_that_left_in_order_does_not_nor_one_during_an_exit(code: str, end: str) -> None:
    process = listen(f"{PEER}\n{code}", end=end)
    time.sleep(1.5)
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.mark.parametrize(
    "notices_it",
    [
        "listener.exit.launch = listener.launch = launch",
        "listener.exit.launch = launch\nlistener.exit.exit_process(RuntimeError('Connection closed'))",
    ],
)
def test_the_end_of_the_agent_ends_the_process(notices_it: str) -> None:
    orphaned = "Launch(world_size=2, agent_pid=os.getppid() + 1, master_addr='localhost')"
    process = listen(f"launch = {orphaned}", then=notices_it)
    assert code_of(process) == 1
    assert process.stderr is not None and len(process.stderr.readlines()) == 1
