"""The agent of plain `python train.py` obeys a signal, whenever it comes, and needs no host name."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from conftest import ROOT, wait_until
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch

from mingpt.config import Config
from mingpt.distributed import GenerationEnd, Launch, Worker
from mingpt.distributed.exit import JOB_ENDED, STORAGE_S, before_first_step
from mingpt.distributed.signals import StopSignal
from mingpt.launch import agent
from mingpt.launch.agent import StopRequest, job_exit, launch_config, register_rendezvous

# A worker that records the signal that it gets.
WORKER = """
import signal, sys, time
from pathlib import Path
mark = Path(sys.argv[1])
signal.signal(signal.SIGHUP, lambda number, _: sys.exit(mark.write_text(signal.Signals(number).name)))
mark.touch()
time.sleep(60)
"""


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_agent_obeys_a_signal_before_it_starts_workers_and_while_they_run(
    comes_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler itself raises nothing, since torch might swallow it."""
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", f"test-{comes_first}")
    stop, mark = StopRequest(), tmp_path / "mark"
    register_rendezvous(new_store(), stop)

    def send_signal() -> None:
        wait_until(lambda: comes_first or mark.exists())
        stop.note(signal.SIGHUP, None)

    sender = threading.Thread(target=send_signal)
    sender.start()
    start = elastic_launch(launch_config(1, 3), sys.executable)
    with pytest.raises(SignalException) as error:
        start("-c", WORKER, str(mark))
    sender.join()
    assert error.value.sigval == signal.SIGHUP
    assert comes_first or mark.read_text() == "SIGHUP"
    timer = Mock()
    monkeypatch.setattr(threading, "Timer", timer)
    with pytest.raises(SignalException):  # a second signal reaches workers that are stuck
        stop.note(signal.SIGHUP, None)
    timer.assert_called_once_with(STORAGE_S, os._exit, [1])


def end(why: str, code: int | None = None) -> GenerationEnd:
    reason = {"why": why, "step": 4, "code": code}
    return GenerationEnd([reason, reason])


LOST, FAILED = end("lost a peer (refused)"), end("failed (OSError)")
TERM, EARLY = signal.SIGTERM, before_first_step("SIGTERM")
TOLD_LATE = "error: the job was told to stop, but worker 0 could not end in order\n"
NO_RESTART = "and no restart is left (trainer.max_restarts)\n"


@pytest.mark.parametrize(
    ("told", "codes", "end", "expected"),
    [
        (None, {}, None, (1, "error: the workers ended without training: train.py\n")),
        (None, {}, end("finished", 0), (0, "")),
        (TERM, {}, end("stopped by SIGUSR1", 0), (0, "")),
        (TERM, {}, end("told to stop by SIGTERM", 0), (0, "")),
        (TERM, {}, end("told to stop by SIGTERM before the first step", 0), (0, EARLY)),
        (TERM, {}, None, (0, EARLY)),
        (TERM, {}, end("told to stop by SIGTERM"), (1, TOLD_LATE)),  # a second signal: nothing was saved
        (TERM, {}, GenerationEnd([None, None]), (1, TOLD_LATE)),
        (TERM, {1: -9}, LOST, (1, f"error: worker 1 was killed by SIGKILL {NO_RESTART}")),
        (JOB_ENDED, {0: 2, 1: -15}, end("ended the job (UserError: no)", 2), (2, "")),
        (JOB_ENDED, {}, None, (1, "")),
        (None, {0: 1, 1: -9}, LOST, (1, f"error: worker 1 was killed by SIGKILL {NO_RESTART}")),
        (None, {0: 1, 1: 1}, LOST, (1, f"error: the workers lost a peer (refused) {NO_RESTART}")),
        (None, {0: 1, 1: 1}, FAILED, (1, "")),
        (None, {0: 1}, None, (1, "")),
    ],
)
def test_the_exit_code_of_plain_python(
    told: signal.Signals | None, codes: dict[int, int], end: GenerationEnd | None, expected: tuple[int, str]
) -> None:
    """A worker that failed has printed why."""
    assert job_exit(told, codes, end, "train.py") == expected


NO_TRAINING = """
from mingpt.launch.agent import run_agent
from mingpt.distributed import Worker
run_agent(2, 0, ["-c", "pass"], Worker().stop_signal)
"""
# Workers inherit a mask that blocks SIGTERM until a worker's StopSignal listens.
SLEEPER = """
import signal, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
print("up", flush=True)
time.sleep(60)
"""
ASLEEP = NO_TRAINING.replace('"pass"', repr(SLEEPER))
# An agent whose main thread is in C code, where Python runs no handlers: a resolver that does not answer.
DEAF = """
import ctypes, torch.distributed
from mingpt.launch.agent import run_agent
from mingpt.distributed import Worker
# The line is printed by C code, too: before it, Python would still run the handler.
torch.distributed.TCPStore = lambda *_, **options: ctypes.CDLL(None).system(b"echo; exec sleep 20 >&- 2>&-")
run_agent(2, 0, ["-c", "pass"], Worker().stop_signal)
"""


def tell(program: str, *signals: signal.Signals) -> tuple[int, str]:
    """Send the signals to a program when it has printed a line; return its exit code and stderr."""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for number in signals:
        process.send_signal(number)
    _, said = process.communicate(timeout=10)
    return process.returncode, said


def test_a_signal_is_heard_while_the_main_thread_is_in_c_code() -> None:
    assert tell(DEAF, TERM) == (0, EARLY)


def test_an_agent_that_is_asked_for_its_stacks_goes_on() -> None:
    code, said = tell(ASLEEP, signal.SIGUSR2, TERM)
    assert code == 0 and "most recent call first" in said and said.endswith(EARLY)


def test_workers_that_end_without_training_are_an_error() -> None:
    """Success without a run that ended is impossible."""
    done = subprocess.run([sys.executable, "-c", NO_TRAINING], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "error: the workers ended without training" in done.stderr


@pytest.mark.parametrize("program", ["-", "-c", "", "no/such/file.py", str(ROOT / "sample.py")])
def test_workers_are_started_by_the_path_of_a_file(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python - seed=1 < train.py` has read its program from standard input, which is empty for workers."""
    started: list[list[str]] = []
    monkeypatch.setattr(agent, "choose_workers", lambda config, launch: 2)
    monkeypatch.setattr(agent, "run_agent", lambda workers, restarts, command, stop: started.append(command))
    worker = Worker.__new__(Worker)
    worker.launch, worker.stop_signal = Launch(), StopSignal.__new__(StopSignal)
    agent.start_workers(worker, Config(), [program, "seed=1"])
    is_file = program.endswith("sample.py")
    expected = [program] if is_file else ["-m", "mingpt.launch.train"]
    assert started == [[*expected, "seed=1"]]


def test_the_store_of_the_workers_is_at_an_address_not_at_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", "test-address")
    register_rendezvous(new_store(), StopRequest())
    parameters = RendezvousParameters("test-address", "", "id", 1, 1)
    info = rendezvous_handler_registry.create_handler(parameters).next_rendezvous()
    assert info.bootstrap_store_info is not None and info.bootstrap_store_info.master_addr == "127.0.0.1"
