"""The agent of plain `python train.py` obeys a signal, whenever it comes."""

import os
import signal
import subprocess
import sys
import threading
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import elastic_launch

from mingpt.config.cli import build
from mingpt.distributed import GenerationEnd, Launch
from mingpt.distributed.exit import JOB_ENDED, STORAGE_S, before_first_step
from mingpt.launch.agent import StopRequest, choose_workers, job_exit, launch_config, register_rendezvous
from mingpt.tools.jobs import ROOT


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_signal_before_the_workers_start_is_obeyed_and_a_second_one_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The handler itself raises nothing at the first one, since torch might swallow it."""
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", "test-signals")
    stop, timer = StopRequest(), Mock()
    register_rendezvous(new_store(), stop)
    stop.note(signal.SIGHUP, None)
    with pytest.raises(SignalException) as error:
        elastic_launch(launch_config(1, 3), sys.executable)("-c", "raise SystemExit(1)")
    assert error.value.sigval == signal.SIGHUP
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
        (None, {}, end("stopped by STOP", 0), (0, "")),
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


def test_auto_starts_no_more_workers_than_a_step_has_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.launch.agent.usable_cores", lambda: 64)
    settings = {"trainer.device": "cpu", "trainer.batch_size": 12, "trainer.micro_batch_size": 4}
    assert choose_workers(build(settings), Launch()) == 3


NO_TRAINING = """
from mingpt.launch.agent import run_agent
from mingpt.distributed import Worker
run_agent(2, 0, ["-c", "pass"], Worker().stop_signal)
"""
# Workers inherit a mask that blocks SIGTERM until a worker's SignalListener listens.
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


@pytest.mark.parametrize(
    ("program", "signals", "code", "said"),
    [
        (DEAF, [TERM], 0, [EARLY]),
        (ASLEEP, [signal.SIGUSR2, TERM], 0, ["most recent call first", EARLY]),  # the first asks for stacks
        (NO_TRAINING, [], 1, ["error: the workers ended without training"]),
    ],
    ids=["in C code", "asked for stacks", "without training"],
)
def test_an_agent_obeys_signals_at_any_time_and_succeeds_only_with_a_run(
    program: str, signals: list[signal.Signals], code: int, said: list[str]
) -> None:
    """The signals are sent when the program has printed a line."""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    for number in signals:
        process.send_signal(number)
    shown = process.communicate(timeout=20)[1]
    assert process.returncode == code and all(words in shown for words in said), shown
