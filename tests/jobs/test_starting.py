"""Imports that fail, workers that do not come, and requests to stop before the first step."""

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Finish, Start, all_gone, changed_program, command, final_hash, snapshot_steps
from support.jobs import Job, descendants, read_history

from mingpt.tools.jobs import torchrun

FAILS_TO_IMPORT = """
import os
if os.environ.get("RANK") == "1":
    sys.modules["mingpt.training.trainer"] = None
"""


@pytest.mark.slow
def test_an_import_that_fails_ends_the_job_though_restarts_are_left(
    start: Start, text: Path, tmp_path: Path
) -> None:
    """A restart would repeat it."""
    program = changed_program(tmp_path, FAILS_TO_IMPORT)
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__timeout_s": 60}
    job = start(command(program=program, trainer__workers=2, trainer__max_restarts=50, **settings))
    assert job.wait() == 1
    said = "ModuleNotFoundError: import of mingpt.training.trainer"
    assert job.err().count(said) == 1 and job.err().count("Traceback") == 1, job.err()


FREEZES = """
import os
from pathlib import Path
def freeze(launch):
    mark = Path({folder!r}) / "frozen"
    if launch.world_size > 1 and launch.rank == {rank} and not mark.exists():
        mark.write_text(str(os.getpid()))
        os.kill(os.getpid(), 19)
events.subscribe("worker_start", freeze)
"""


# Rank 0 answers the first of two ranks, then freezes. The second rank, which comes later, is not to blame.
FREEZES_HALF_WAY = """
import os
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
if os.environ.get("RANK") == "{rank}":
    dist.TCPStore = Store
if os.environ.get("RANK") == "2":
    time.sleep(1.0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "workers", "code"),
    [pytest.param(1, 2, FREEZES, marks=pytest.mark.weekly), (0, 3, FREEZES_HALF_WAY)],
)
def test_a_worker_frozen_before_the_meeting_is_given_up(
    rank: int, workers: int, code: str, start: Start, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The others wait for timeout_s or three starts, and not 30 s longer, until the agent would kill it."""
    program = changed_program(tmp_path, code.format(folder=str(tmp_path), rank=rank))
    settings: dict[str, Any] = {"run_dir": tmp_path / "run", "data__path": text, "trainer__timeout_s": 4}
    job = start(command(launcher=torchrun(workers, restarts=1), program=program, **settings))
    pid = job.wait_until(lambda: (tmp_path / "frozen").exists() and (tmp_path / "frozen").read_text())
    began = time.monotonic()
    job.wait_until(lambda: all_gone([int(pid)]))
    gone_s = time.monotonic() - began
    assert job.wait() == 0, job.err()
    named = re.search(rf"worker {rank} did not reach the rendezvous within ([\d.]+) s", job.err())
    assert named, job.err()
    assert gone_s < float(named[1]) + 10, "30 s more is what the agent waits before SIGKILL"
    assert final_hash(tmp_path / "run") == final_hash(undisturbed)


SLOW_TO_LOAD = """
import time
from pathlib import Path
import mingpt.training.trainer
def read_slowly(config):
    Path({mark!r}).touch()
    time.sleep(60)
mingpt.training.facts.open_data = read_slowly
"""
SLOW_TO_BUILD = """
import time
from pathlib import Path
import mingpt.training.run
def compile_slowly(*arguments, **options):
    Path({mark!r}).touch()
    time.sleep(60)
mingpt.training.run.can_compile_block = compile_slowly
"""


def request(kind: str, job: Job, run_dir: Path) -> None:
    if kind == "STOP":
        run_dir.mkdir(exist_ok=True)
        (run_dir / "STOP").touch()
    else:
        os.kill(max(job.workers(), default=job.pid), getattr(signal, kind))


@pytest.mark.parametrize(
    ("code", "kind", "workers"),
    [
        (SLOW_TO_LOAD, "STOP", 2),
        pytest.param(SLOW_TO_LOAD, "SIGUSR1", 1, marks=pytest.mark.slow),
        pytest.param(SLOW_TO_LOAD, "SIGTERM", 1, marks=pytest.mark.slow),
        pytest.param(SLOW_TO_BUILD, "SIGUSR1", 2, marks=pytest.mark.slow),
    ],
)
def test_a_stop_during_the_start_is_obeyed_at_once(
    code: str, kind: str, workers: int, start: Start, text: Path, tmp_path: Path
) -> None:
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    program = changed_program(tmp_path, code.format(mark=str(mark)))
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text, "trainer__compile": True}
    job = start(command(program=program, trainer__workers=workers, **settings))
    job.wait_until(mark.exists)
    pids = descendants(job.pid)
    began = time.monotonic()
    request(kind, job, run_dir)
    assert job.wait(30) == 0, job.err()
    assert time.monotonic() - began < 4, "2 s, and twice that on a busy machine"
    assert all_gone(pids) and not (run_dir / "STOP").exists() and snapshot_steps(run_dir) == []
    assert job.err().count("before the first step") == 1, job.err()
    assert read_history(run_dir)["generations"] == []


DIES_THEN_LOADS_SLOWLY = """
import os, time
from pathlib import Path
import mingpt.training.trainer
if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "1":
    def read_slowly(config):
        Path({mark!r}).touch()
        time.sleep(60)
    mingpt.training.facts.open_data = read_slowly
def die(step):
    if step == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
events.subscribe("step_start", die)
"""


@pytest.mark.slow
def test_a_stop_while_a_restart_begins_is_noted_and_the_run_goes_on_later(
    start: Start, finish: Finish, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run_dir, mark = tmp_path / "run", tmp_path / "mark"
    program = changed_program(tmp_path, DIES_THEN_LOADS_SLOWLY.format(mark=str(mark)))
    settings: dict[str, Any] = {"run_dir": run_dir, "data__path": text}
    job = start(command(launcher=torchrun(2, restarts=3), program=program, **settings))
    job.wait_until(mark.exists)
    request("STOP", job, run_dir)
    assert job.wait(30) == 0, job.err()
    assert read_history(run_dir)["status"] == "stopped"
    finish(trainer__workers=1, **settings)
    assert final_hash(run_dir) == final_hash(undisturbed)
    assert read_history(run_dir)["status"] == "finished"
