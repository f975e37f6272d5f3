"""The examples for loops of one's own: their last line is the same after kills and stops."""

import functools
import itertools
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.jobs import ROOT, Job, Start, children, send_to, torchrun

pytestmark = pytest.mark.slow
# An example, and a number of workers.
ALWAYS = [("ddp_loop", 2), ("own_loop", 2)]
EXAMPLES = ("plain_loop", "ddp_loop", "fsdp_loop", "own_loop", "hf_trainer")
ONCE_A_WEEK = list(itertools.product(EXAMPLES, (1, 2)))


@pytest.fixture
def run_recipe(start: Start, tmp_path: Path) -> Callable[[str, int, str], Job]:
    """A function that starts an example in the folder `tmp_path`/`where`, with 200 steps or more."""

    def run(name: str, workers: int, where: str) -> Job:
        folder = tmp_path / where
        folder.mkdir(exist_ok=True)
        launcher = torchrun(workers) if workers > 1 or name in ("ddp_loop", "fsdp_loop") else [sys.executable]
        text = (ROOT / "examples" / f"{name}.py").read_text().replace(" = 1, 900,", " = 1, 200,")
        (folder / "loop.py").write_text(text.replace("Path(__file__).parent.parent", f"Path({str(ROOT)!r})"))
        command = ["env", "-C", str(folder), *launcher, "loop.py"]
        return start(command, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")

    return run


def weights_of(job: Job) -> str:
    assert job.wait(600) == 0, job.err()
    line = job.out().splitlines()[-1]
    assert re.fullmatch("weights [0-9a-f]{64}", line)
    return line


def has_snapshot(folder: Path) -> bool:
    return any(folder.glob("*/step_*.json"))


@pytest.mark.parametrize(
    ("name", "workers", "count"),
    [(*one, 1) for one in ALWAYS] + [pytest.param(*one, 10, marks=pytest.mark.weekly) for one in ONCE_A_WEEK],
)
def test_kills_and_stops_of_a_worker_cost_no_bit(
    name: str, workers: int, count: int, run_recipe: Callable[[str, int, str], Job], tmp_path: Path
) -> None:
    """Twice as many kills, at any moment, and stops after a snapshot; own_loop.py stops as train.py does."""
    began, rng = time.monotonic(), random.Random(f"{name} {workers}")
    expected = weights_of(run_recipe(name, workers, "undisturbed"))
    duration = time.monotonic() - began
    signals = [signal.SIGKILL] * 2 * count + [signal.SIGTERM] * count * (name != "own_loop")
    for number, what in enumerate(signals):
        job, folder = run_recipe(name, workers, str(number)), tmp_path / str(number)
        if what == signal.SIGTERM:
            job.wait_until(functools.partial(has_snapshot, folder))
        time.sleep(rng.uniform(0, duration if what == signal.SIGKILL else duration / 10))
        victims = children(job.pid) or [job.pid]
        send_to(what, victims[-1:])
        code = job.wait(600)
        assert what == signal.SIGKILL or code == 0, job.err()
        assert weights_of(run_recipe(name, workers, str(number))) == expected
