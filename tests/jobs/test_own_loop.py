"""The example of a loop of one's own: its weights have one hash for any number of workers, and if killed."""

import os
import re
import signal
from pathlib import Path

import pytest
from conftest import ROOT, Start
from support.jobs import Job, children

from mingpt.tools.jobs import torchrun

EXAMPLE = ROOT / "examples" / "own_loop.py"


def start_loop(start: Start, folder: Path, workers: int, restarts: int = 0, steps: int = 900) -> Job:
    """Start the example, perhaps with fewer steps, in a folder."""
    text = EXAMPLE.read_text()
    assert text.count(" 900,") == 1
    folder.mkdir(exist_ok=True)
    (folder / "loop.py").write_text(text.replace(" 900,", f" {steps},"))
    command = ["env", "-C", str(folder), *torchrun(workers, restarts), "loop.py"]
    return start(command, PYTHONPATH=str(ROOT))


def weights_of(job: Job) -> str:
    assert job.wait() == 0, job.err()
    line = job.out().splitlines()[-1]
    assert re.fullmatch("weights [0-9a-f]{64}", line)
    return line


@pytest.mark.slow
def test_a_loop_of_ones_own_has_one_hash_through_a_kill_and_a_second_start(
    start: Start, tmp_path: Path
) -> None:
    """The second start goes on from the snapshots of the first, with another number of workers."""
    expected = weights_of(start_loop(start, tmp_path / "1", 1, steps=60))
    job = start_loop(start, tmp_path / "2", 2, restarts=1, steps=40)
    job.wait_until(lambda: list(tmp_path.glob("2/own_loop/step_*.json")))
    os.kill(children(job.pid)[1], signal.SIGKILL)
    assert weights_of(job) != expected
    assert weights_of(start_loop(start, tmp_path / "2", 3, steps=60)) == expected
