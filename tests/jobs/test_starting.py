"""Workers that do not come, and requests to stop before the first step."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.jobs import descendants, read_history
from support.small_jobs import Begin, Finish, all_gone, final_hash, generations, snapshot_steps

from mingpt.tools.jobs import torchrun

# Rank 0 answers the first of two ranks, then freezes. The second rank, which comes later, is not to blame.
FREEZES_HALF_WAY = """
import time
from pathlib import Path
import torch.distributed as dist
mark = Path({folder!r}) / "frozen"
class Store(dist.TCPStore):
    def set(self, key, value):
        super().set(key, value)
        if key.startswith("answer/") and not mark.exists():
            mark.write_text(str(os.getpid()))
            os.kill(os.getpid(), 19)
if os.environ.get("RANK") == "0":
    dist.TCPStore = Store
if os.environ.get("RANK") == "2":
    time.sleep(1.0)
"""


@pytest.mark.slow
def test_a_worker_frozen_before_the_meeting_is_given_up(
    begin: Begin, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    """The others wait for timeout_s or three starts, and not 30 s longer, until the agent would kill it."""
    code = FREEZES_HALF_WAY.format(folder=str(tmp_path))
    job = begin(code=code, launcher=torchrun(3, restarts=1), trainer__timeout_s=4)
    pid = job.wait_until(lambda: (tmp_path / "frozen").exists() and (tmp_path / "frozen").read_text())
    began = time.monotonic()
    job.wait_until(lambda: all_gone([int(pid)]))
    gone_s = time.monotonic() - began
    assert job.wait() == 0, job.err()
    named = re.search(r"worker 0 did not reach the rendezvous within ([\d.]+) s", job.err())
    assert named, job.err()
    assert gone_s < float(named[1]) + 10, "30 s more is what the agent waits before SIGKILL"
    assert final_hash(run_dir) == final_hash(undisturbed)


# The start takes a minute, in a restart if the worker has died in the first generation.
SLOW = """
import time
from pathlib import Path
import mingpt.training.run, mingpt.training.trainer
def take_long(*arguments, **options):
    Path({mark!r}).touch()
    time.sleep(60)
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == {generation!r}:
    {function} = take_long
def die(step):
    if step == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
events.subscribe("step_start", die)
"""
LOADING, BUILDING = "mingpt.training.facts.open_data", "mingpt.training.run.can_compile_block"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (LOADING, "SIGINT"),
        pytest.param(LOADING, "STOP", marks=pytest.mark.slow),
        pytest.param(BUILDING, "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_stop_during_the_start_is_obeyed_at_once(
    function: str, kind: str, begin: Begin, run_dir: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    code = SLOW.format(mark=str(mark), function=function, generation="0")
    job = begin(code=code, trainer__workers=2, trainer__compile=True)
    job.wait_until(mark.exists)
    pids = descendants(job.pid)
    began = time.monotonic()
    if kind == "STOP":
        run_dir.mkdir(exist_ok=True)
        (run_dir / "STOP").touch()
    else:
        os.kill(job.pid if kind == "SIGINT" else job.workers()[1], getattr(signal, kind))
    assert job.wait(30) == 0, job.err()
    assert time.monotonic() - began < 4, "2 s, and twice that on a busy machine"
    assert all_gone(pids) and not (run_dir / "STOP").exists() and snapshot_steps(run_dir) == []
    assert job.err().count("before the first step") == 1, job.err()
    assert generations(run_dir) == []


@pytest.mark.slow
def test_a_stop_while_a_restart_begins_is_noted_and_the_run_goes_on_later(
    begin: Begin, finish: Finish, undisturbed: Path, run_dir: Path, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    code = SLOW.format(mark=str(mark), function=LOADING, generation="1")
    job = begin(code=code, launcher=torchrun(2, restarts=3))
    job.wait_until(mark.exists)
    (run_dir / "STOP").touch()
    assert job.wait(30) == 0, job.err()
    assert read_history(run_dir)["status"] == "stopped"
    finish(trainer__workers=1)
    assert final_hash(run_dir) == final_hash(undisturbed)
