"""How the agent of plain `python train.py` obeys a signal, whenever it comes."""

import signal
import sys
import threading
from pathlib import Path

import pytest
from conftest import wait_until
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.launcher.api import elastic_launch

from mingpt.launch.agent import StopRequest, launch_config, register_rendezvous

# A worker that writes down the signal that it gets.
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
    code, said = stop.exit_code(), capsys.readouterr().err
    if comes_first:
        assert not mark.exists()
        assert code == 0 and said == "stopped by SIGHUP before the first step\n"
    else:
        assert mark.read_text() == "SIGHUP"
        assert code == 1 and said.startswith("error: ") and said.count("\n") == 1
    with pytest.raises(SignalException):  # a second one reaches workers that are stuck
        stop.note(signal.SIGHUP, None)


@pytest.mark.parametrize(
    ("status", "code", "said"), [("0 ", 0, ""), ("2 ", 2, ""), ("0 stopped\n", 0, "stopped\n")]
)
def test_of_a_job_that_was_stopped_its_workers_know_the_exit_code(
    status: str, code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop = StopRequest(tmp_path / "status")
    stop.status_file.write_text(status)
    assert stop.exit_code() == code and capsys.readouterr().err == said
