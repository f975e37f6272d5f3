"""Jobs for the tests: small runs of train.py, alone or under torchrun, as a user starts them."""

import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SMALL = {
    "data.block_size": 32,
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.n_embd": 32,
    "trainer.batch_size": 8,
    "trainer.micro_batch_size": 1,
    "trainer.max_steps": 30,
    "trainer.eval_every": 10,
    "trainer.log_every": 1,
    "trainer.sample_tokens": 0,
    "trainer.timeout_s": 30,
    "trainer.device": "cpu",
    "snapshot.every": 5,
    "snapshot.keep_last": 100,
    "snapshot.memory_path": tempfile.mkdtemp(
        prefix="mingpt-tests-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None
    ),  # killed jobs leave theirs
}


def pytest_sessionfinish() -> None:
    shutil.rmtree(str(SMALL["snapshot.memory_path"]), ignore_errors=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """This process's environment without what a launcher or a user may have left in it."""
    dropped = ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "LOCAL_RANK")
    return {key: value for key, value in os.environ.items() if key not in dropped and not key.startswith("TORCHELASTIC")} | more


@dataclass
class Done:
    code: int
    out: str
    err: str


class Job:
    """A running command with everything it started; ends with the test."""

    def __init__(self, command: list[str], **env: str) -> None:
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**env), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )

    def workers(self) -> list[int]:
        """Process ids of the workers: torchrun's direct children with train.py in their command line."""
        found = []
        for pid in children(self.process.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue
            found += [pid] if b"train.py" in words else []
        return found

    def finish(self, timeout: float = 120) -> Done:
        try:
            out, err = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(f"not done after {timeout} s:\n{out[-3000:]}\n{err[-3000:]}") from None
        return Done(self.process.returncode, out, err)

    def kill(self) -> None:
        for pid in [*descendants(self.process.pid), self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # it ended by itself


def alive(pid: int) -> bool:
    """Whether a process runs; an orphan that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def descendants(pid: int) -> list[int]:
    return [found for child in children(pid) for found in (*descendants(child), child)]


@pytest.fixture
def start() -> Iterator[Callable[..., Job]]:
    """Start a command in the background; whatever is left of it is killed when the test ends."""
    jobs: list[Job] = []

    def starter(command: list[str], **env: str) -> Job:
        jobs.append(Job(command, **env))
        return jobs[-1]

    yield starter
    for job in jobs:
        if job.process.poll() is None:
            job.kill()
        job.process.communicate()


def command(
    *words: Any, workers: int | None = None, torchrun: tuple[str, ...] = ("--standalone",), restarts: int = 0, small: bool = True, **settings: Any
) -> list[str]:
    """The command line of a run; without `workers` plain python. Settings spell a dot as two underscores."""
    given = (SMALL if small else {}) | {key.replace("__", "."): value for key, value in settings.items()}
    launcher = (
        [sys.executable]
        if workers is None
        else [sys.executable, "-m", "torch.distributed.run", *torchrun, f"--nproc_per_node={workers}", f"--max-restarts={restarts}"]
    )
    return [*launcher, "train.py", *map(str, words), *(f"{key}={value}" for key, value in given.items())]


def wait_until(condition: Callable[[], Any], job: Job | None = None, timeout: float = 90) -> Any:
    """Poll until the condition holds and return what it gave; fails when time is up or the job ended before."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if job and job.process.poll() is not None:
            raise AssertionError(f"the job ended first, code {job.process.returncode}:\n{job.process.communicate()[1][-3000:]}")
        assert time.monotonic() < deadline, "time is up"
        time.sleep(0.01)
    return value


def records(run_dir: Path, name: str = "train/loss") -> dict[int, float]:
    """{step: value} of one metric; a line that is being written is not there yet."""
    path = run_dir / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")] if path.exists() else []
    return {record["step"]: record[name] for record in map(json.loads, lines) if name in record}


def reached(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: max(records(run_dir), default=-1) >= step


def manifest(run_dir: Path, step: int) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_dir / "snapshots" / f"step_{step:08d}.json").read_text())
    return content


def final_hash(run_dir: Path, step: int = 30) -> str:
    """SHA-256 of the tensors of model and optimizer at a step, taken from the file itself."""
    digest = hashlib.sha256((run_dir / "snapshots" / f"step_{step:08d}.safetensors").read_bytes()).hexdigest()
    assert digest == manifest(run_dir, step)["sha256"]
    return digest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short piece of the embedded play."""
    path = tmp_path_factory.mktemp("text") / "play.txt"
    path.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
    return path


@pytest.fixture(scope="session")
def undisturbed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two workers that nothing disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    done = Job(command(workers=2, run_dir=run_dir, data__path=text)).finish()
    assert done.code == 0, done.err
    return run_dir
