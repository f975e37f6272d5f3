"""The agent of plain `python train.py` obeys a signal, whenever it comes, and needs no host name."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import ROOT, wait_until
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch

from mingpt.config import PROJECT, Config
from mingpt.distributed import Launch
from mingpt.launch import agent
from mingpt.launch.agent import DEAF_S, StopRequest, launch_config, register_rendezvous
from mingpt.launch.worker import Worker

# A worker that records the signal that it gets.
WORKER = """
import signal, sys, time
from pathlib import Path
mark = Path(sys.argv[1])
signal.signal(signal.SIGHUP, lambda number, _: sys.exit(mark.write_text(signal.Signals(number).name)))
mark.touch()
time.sleep(60)
"""


@pytest.mark.parametrize("comes_first", [True, False])
def test_the_agent_obeys_a_signal_before_it_starts_workers_and_while_they_run(
    comes_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The handler itself raises nothing, since torch might swallow it."""
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", f"test-{comes_first}")
    stop, mark = StopRequest(tmp_path / "status"), tmp_path / "mark"
    register_rendezvous(stop)

    def send_signal() -> None:
        wait_until(lambda: comes_first or mark.exists())
        stop.note(signal.SIGHUP, None)

    sender = threading.Thread(target=send_signal)
    sender.start()
    start = elastic_launch(launch_config(1, 3, tmp_path), sys.executable)
    with pytest.raises(SignalException) as error:
        start("-c", WORKER, str(mark))
    sender.join()
    assert error.value.sigval == signal.SIGHUP
    assert comes_first or mark.read_text() == "SIGHUP"
    code, said = stop.exit_code(), capsys.readouterr().err
    assert code == (0 if comes_first else 1), "a worker that was killed has written no code"
    # Newer versions of torch first log lines of their own.
    assert ("stopped by SIGHUP before" if comes_first else "error: the job was told to stop") in said
    stop.status_file.write_text("2 ")
    assert stop.exit_code() == 2 and capsys.readouterr().err == "", "a worker has ended the job, and said why"
    with pytest.raises(SignalException):  # a second signal reaches workers that are stuck
        stop.note(signal.SIGHUP, None)


NO_TRAINING = """
from mingpt.launch.agent import run_agent
from mingpt.launch.worker import Worker
run_agent(2, 0, ["-c", "pass"], Worker().stop_signal)
"""
# An agent whose main thread is in C code, where Python runs no handlers.
DEAF = """
import ctypes, signal
from pathlib import Path
from mingpt.launch.agent import StopRequest
stop = StopRequest(Path("status"))
signal.signal(signal.SIGTERM, stop.note)
stop.listen()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
# The line is printed by C code, too: before it, Python would still run the handler.
ctypes.CDLL(None).system(b"echo; exec sleep 20 >&- 2>&-")
"""


@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_is_heard_while_the_main_thread_is_in_c_code(signals: int) -> None:
    process = subprocess.Popen([sys.executable, "-c", DEAF], cwd=ROOT, stdout=-1, stderr=-1, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    began = time.monotonic()
    process.terminate()
    if signals == 2:
        time.sleep(1.5)  # two signals within a second are one request
        process.terminate()
    _, said = process.communicate(timeout=30)
    assert process.returncode == 0 and "before the first step" in said
    assert (time.monotonic() - began < DEAF_S) == (signals == 2)


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
    worker.launch, worker.watch_stop_file = Launch(), lambda config: None  # type: ignore[method-assign]
    worker.stop_signal = None  # type: ignore[assignment]
    worker.start_workers(Config(), [program, "seed=1"])
    is_file = program.endswith("sample.py")
    assert started == [[program if is_file else str(PROJECT / "train.py"), "seed=1"]]


def test_the_store_of_the_workers_is_at_an_address_not_at_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", "test-address")
    monkeypatch.setattr("mingpt.launch.agent.loopback_address", lambda: "127.0.0.1")
    register_rendezvous(StopRequest(Path("status")))
    parameters = RendezvousParameters("test-address", "", "id", 1, 1)
    info = rendezvous_handler_registry.create_handler(parameters).next_rendezvous()
    assert info.bootstrap_store_info is not None and info.bootstrap_store_info.master_addr == "127.0.0.1"
