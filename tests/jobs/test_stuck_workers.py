"""Workers whose main thread waits in C code, as in a CUDA call, while another worker of the node is gone."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Start, all_gone, changed_program, command, final_hash, wait_until
from support.jobs import read_history

from mingpt.tools.jobs import torchrun

# The C function pause() returns only after a signal; ctypes has released the GIL.
STUCK = """
import ctypes, os
from pathlib import Path
def on_step_start(step):
    mark = Path({folder!r}) / ("stuck-" + os.environ["RANK"])
    if step == 12 and os.environ["RANK"] in {ranks!r} and not mark.exists():
        mark.write_text(str(os.getpid()))
        while True:
            ctypes.CDLL(None).pause()
events.subscribe("step_start", on_step_start)
"""


def stuck_pid(folder: Path, rank: int) -> int:
    """The process id of a worker that is stuck; 0 before it is stuck."""
    try:
        return int((folder / f"stuck-{rank}").read_text() or 0)
    except OSError:
        return 0


@pytest.mark.slow
def test_a_stuck_worker_leaves_when_its_sibling_is_gone(
    start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The agent's SIGTERM alone would not end it."""
    program = changed_program(tmp_path, STUCK.format(folder=str(tmp_path), ranks="0"))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__timeout_s": 300}
    job = start(command(launcher=torchrun(2, restarts=1), program=program, **settings))
    job.wait_until(lambda: stuck_pid(tmp_path, 0))
    stuck, (other,) = stuck_pid(tmp_path, 0), [pid for pid in job.workers() if pid != stuck_pid(tmp_path, 0)]
    began = time.monotonic()
    os.kill(other, signal.SIGKILL)
    wait_until(lambda: all_gone([stuck]), timeout_s=10)
    assert time.monotonic() - began < 1.5
    assert job.wait() == 0, job.err()
    assert [entry["end"] for entry in read_history(tmp_path / "run")["generations"]] == [
        "worker 1 vanished",
        "finished",
    ]
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)


@pytest.mark.slow
def test_the_place_where_a_worker_is_stuck_is_told(start: Start, text: Path, tmp_path: Path) -> None:
    """The place is logged even though the C code holds the GIL."""
    code = STUCK.format(folder=str(tmp_path), ranks="1").replace("ctypes.CDLL", "ctypes.PyDLL")
    program = changed_program(tmp_path, code)
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__timeout_s": 4}
    job = start(command(launcher=torchrun(2, restarts=1), program=program, **settings))
    assert job.wait() == 0, job.err()
    line = program.read_text().partition("PyDLL")[0].count("\n") + 1
    place = f"changed_train.py:{line} in on_step_start"
    assert f"worker 1 did not answer for 4 s: {place} at step 12; resumed from" in job.err()
    assert len(list((tmp_path / "run/stacks").iterdir())) == 2, "the second generation was undisturbed"


@pytest.mark.slow
def test_workers_that_are_all_stuck_leave_timeout_s_after_sigterm(
    start: Start, text: Path, tmp_path: Path
) -> None:
    program = changed_program(tmp_path, STUCK.format(folder=str(tmp_path), ranks="01"))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__timeout_s": 3}
    job = start(command(launcher=torchrun(2), program=program, **settings))
    job.wait_until(lambda: stuck_pid(tmp_path, 0) and stuck_pid(tmp_path, 1))
    pids = [stuck_pid(tmp_path, rank) for rank in range(2)]
    began = time.monotonic()
    os.kill(job.pid, signal.SIGTERM)
    wait_until(lambda: all_gone(pids), timeout_s=20)
    assert 2.5 < time.monotonic() - began < 8
    job.wait(20)
