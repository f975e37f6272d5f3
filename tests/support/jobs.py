"""Questions of tests and benchmarks about a job, besides those that mingpt/tools/jobs.py answers."""

import json
import socket
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read_metric(run_dir: Path, name: str = "train/loss") -> dict[int, float]:
    """{step: value} of a metric; a line that is being written is left out."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record[name] for record in records if name in record}


def last_step(run_dir: Path) -> int:
    """The last step on record; -1 before the first."""
    return max(read_metric(run_dir), default=-1)
