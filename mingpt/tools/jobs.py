"""Whole jobs, started and watched from outside, for verify, tests and benchmarks. Linux only."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mingpt.base.files import read_json

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.01


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment without variables that launchers or users may have set, and with `more`."""
    dropped = re.compile("OMP_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK|(TORCHELASTIC|MINGPT)_.*")
    return {name: value for name, value in os.environ.items() if not dropped.fullmatch(name)} | more


def torchrun(workers: int, restarts: int = 0, options: Sequence[str] = ("--standalone",)) -> list[str]:
    """The beginning of a torchrun command; a program and its arguments follow."""
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    return [*command, f"--nproc_per_node={workers}", f"--max-restarts={restarts}"]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not count."""
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


class Job:
    """A command in the folder `cwd`; its output is appended to `<output>.out` and `<output>.err`."""

    def __init__(self, command: Sequence[str], output: Path, *, cwd: Path = ROOT, **env: str) -> None:
        self.out_path, self.err_path = Path(f"{output}.out"), Path(f"{output}.err")
        with open(self.out_path, "ab") as out, open(self.err_path, "ab") as err:
            self.process = subprocess.Popen(
                list(command),
                cwd=cwd,
                env=clean_environment(**env),
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self.process.pid

    def workers(self) -> list[int]:
        """Process ids of living workers, by rank: children with train.py in their command line."""
        found = []
        for pid in children(self.pid):
            try:
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            except OSError:
                continue  # the process has just ended
            if b"train.py" in words and is_alive(pid):
                found.append(pid)
        return sorted(found)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float = 120) -> int:
        """Wait for the exit code. Kills the job and raises TimeoutError if the job does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise TimeoutError(
                f"not done after {timeout_s} s:\n{self.out()[-2000:]}\n{self.err()[-4000:]}"
            ) from None

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = 90) -> Any:
        """Poll until the condition holds; returns its value. Raises RuntimeError if the job ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            value = condition()
            if value:
                return value
            if not self.is_running():
                raise RuntimeError(
                    f"the job ended with code {self.process.returncode}:\n{self.err()[-4000:]}"
                )
            if time.monotonic() > deadline:
                raise TimeoutError(f"not so after {timeout_s} s:\n{self.err()[-4000:]}")
            time.sleep(POLL_S)

    def kill(self) -> None:
        """Send SIGKILL to the command and to all processes that it started."""
        for pid in [*descendants(self.pid), self.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # the process has ended by itself
        self.process.wait()

    def out(self) -> str:
        return self.out_path.read_text()

    def err(self) -> str:
        return self.err_path.read_text()


def read_history(run_dir: Path) -> dict[str, Any]:
    """The content of run.json, or a content in its place while there is none."""
    try:
        return dict(read_json(run_dir / "run.json"))
    except OSError:
        return {"status": "none", "generations": []}


def tensor_hash(run_dir: Path, step: int | None = None) -> str:
    """The `sha256` of a step's manifest, computed from the tensor files; by default of the newest step.

    It is the SHA-256 of the files' own hashes, in the manifest's order. "none" if there is no such snapshot.
    """
    folder = run_dir / "snapshots"
    manifests = sorted(folder.glob("step_*.json" if step is None else f"step_{step:08d}.json"))
    if not manifests:
        return "none"
    files = read_json(manifests[-1])["files"]
    digests = [hashlib.sha256((folder / file["name"]).read_bytes()).hexdigest() for file in files]
    return hashlib.sha256("".join(digests).encode()).hexdigest()
