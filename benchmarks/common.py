"""What the programs of this folder share: jobs under torchrun, their workers, what a run left behind, rows of JSON."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Job:
    """train.py under one torchrun agent or several; `settings` as on a command line. Its output goes to <run_dir>.<agent>.log."""

    def __init__(self, run_dir: Path, *settings: str, workers: int = 2, agents: int = 1, restarts: int = 0) -> None:
        self.run_dir = run_dir
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        several = [f"--nnodes={agents}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=job"]
        command = [sys.executable, "-m", "torch.distributed.run", *(["--standalone"] if agents == 1 else several)]
        command += [f"--nproc_per_node={workers // agents}", f"--max-restarts={restarts}", "train.py", f"run_dir={run_dir}", *settings]
        env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
        self.agents = []
        for agent in range(agents):
            with open(f"{run_dir}.{agent}.log", "ab") as log:
                self.agents.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True))

    def workers(self) -> list[int]:
        """Process ids of living workers: the agents' direct children with train.py in their command line."""
        found = []
        for agent in self.agents:
            try:
                for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
                    if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                        found.append(int(child))
            except OSError:
                pass  # the agent or its child has just ended
        return sorted(found)

    def running(self) -> bool:
        return any(agent.poll() is None for agent in self.agents)

    def wait(self, limit_s: float) -> list[int | None]:
        """Exit codes of the agents; None for one that was not done in time and was killed with its workers."""
        deadline = time.monotonic() + limit_s
        codes: list[int | None] = []
        for agent in self.agents:
            try:
                codes.append(agent.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                for pid in self.workers():
                    os.kill(pid, signal.SIGKILL)
                agent.kill()
                agent.wait()
                codes.append(None)
        return codes

    def log(self) -> str:
        return "".join(Path(f"{self.run_dir}.{agent}.log").read_text() for agent in range(len(self.agents)))

    def told(self) -> dict[str, Any]:
        """run.json, or what it says before it is there."""
        try:
            told: dict[str, Any] = json.loads((self.run_dir / "run.json").read_text())
            return told
        except OSError:
            return {"status": "none", "generations": []}

    def steps(self) -> list[int]:
        """The steps on record, in the order of the file; a line that is being written is not there yet."""
        try:
            lines = (self.run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
        except OSError:
            return []
        return [record["step"] for record in map(json.loads, (line for line in lines if line.endswith("\n"))) if "train/loss" in record]

    def until(self, condition: Callable[[], Any], limit_s: float) -> float:
        """Poll until it holds; returns the monotonic time. Raises RuntimeError when the job has ended or time is up."""
        deadline = time.monotonic() + limit_s
        while not condition():
            if not self.running() or time.monotonic() > deadline:
                raise RuntimeError(f"the job {'is not so far' if self.running() else 'has ended'}:\n{self.log()[-3000:]}")
            time.sleep(0.005)
        return time.monotonic()


def alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def result(run_dir: Path) -> str:
    """SHA-256 of the tensors of a run's last snapshot, shortened."""
    last = max(run_dir.glob("snapshots/step_*.safetensors"), default=None)
    return hashlib.sha256(last.read_bytes()).hexdigest()[:16] if last else "none"


def row(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000 * len(ordered)) // 1000) - 1))]
