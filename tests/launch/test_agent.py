"""The agent of plain `python train.py` obeys a signal, whenever it comes."""

import gc
import signal
import sys
import threading
import weakref
from pathlib import Path

import pytest
from conftest import wait_until
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.launcher.api import elastic_launch

from mingpt.launch.agent import StopRequest, launch_config, register_rendezvous

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
    agent = elastic_launch(launch_config(1, 3, tmp_path), sys.executable)
    with pytest.raises(SignalException) as error:
        agent("-c", WORKER, str(mark))
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


def test_a_rendezvous_is_kept_until_the_process_exits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Freed by the thread of its own heartbeat, it would have that thread join itself: a traceback."""
    monkeypatch.setattr("mingpt.launch.agent.BACKEND", "test-kept")
    register_rendezvous(StopRequest(tmp_path / "status"))
    parameters = RendezvousParameters("test-kept", "localhost:0", "run", 1, 1, is_host=True)
    created = weakref.ref(rendezvous_handler_registry.create_handler(parameters))
    gc.collect()
    assert created() is not None
