"""What 200 GB of token shards cost a run, beside the default run; and their hash for any number of workers.

    python benchmarks/token_shards.py

1,000 files of 200 MB in llm.c's format, sparse: all their tokens are 0. In turns, as `python train.py` with
two workers: the default run, the default run with trainer.eval_windows=200, and the same on the shards.
Measured are the time from the start of the process to the first step, peak resident memory of each worker,
and the share of a step in which it waits for data. Then 1,000 links to one file of random tokens, so that a
wrong window changes the hash: with 1, 2 and 3 workers, and stopped half way and resumed with another number.

A row per run, as JSON. Exit code 1 unless, in the median of the rounds, the shards add at most 0.3 s and
100 MB to the default run, data takes at most 0.5 % of a step, and there is one hash.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import row, short_hash, spread, start_plain, wait_for_success

from mingpt.tools.jobs import Job, last_step, read_history, read_metric

FILES, FILE_BYTES, HEADER_BYTES = 1000, 200_000_000, 1024
TOKENS = (FILE_BYTES - HEADER_BYTES) // 2
TEXT = Path(__file__).parent.parent / "data" / "input.txt"
POLL_S = 0.005
SETTINGS: dict[str, Any] = {
    "trainer.max_steps": 40,
    "trainer.log_every": 1,
    "trainer.sample_tokens": 0,
    "trainer.device": "cpu",
}
EVAL_WINDOWS = {"trainer.eval_windows": 200}
BOUNDS = {"first_step_s": 0.3, "memory_mb": 100.0, "data_share": 0.005}


def header() -> bytes:
    """llm.c's: 256 int32, of which the first three are magic, version and number of tokens."""
    numbers = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    numbers[:3] = 20240520, 1, TOKENS
    return numbers.tobytes()


def write_sparse_shards(folder: Path) -> Path:
    folder.mkdir()
    for number in range(FILES):
        path = folder / f"train_{number:05}.bin"
        path.write_bytes(header())
        os.truncate(path, FILE_BYTES)
    return folder


def write_linked_shards(folder: Path, vocab_size: int) -> Path:
    """As many files that are one: 200 MB of random tokens."""
    folder.mkdir()
    tokens = np.random.default_rng(0).integers(0, vocab_size, TOKENS, dtype=np.uint16)
    one = folder / "random_tokens"
    one.write_bytes(header() + tokens.astype("<u2").tobytes())
    for number in range(FILES):
        (folder / f"train_{number:05}.bin").symlink_to(one)
    return folder


def peak_memory_mb(pid: int) -> float:
    """Peak resident memory of a process so far; 0 if it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    peak = next((line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")), "0")
    return int(peak) / 1024


def measure(run_dir: Path, settings: dict[str, Any], workers: int) -> dict[str, Any]:
    """Run to the end, watched. Raises RuntimeError if the run fails."""
    began = time.monotonic()
    job = start_plain(run_dir, SETTINGS | settings, workers, 0)
    first_step_s, peaks = 0.0, dict[int, float]()
    while job.is_running():
        if not first_step_s and last_step(run_dir) >= 1:
            first_step_s = time.monotonic() - began
        for pid in job.workers() or [job.pid]:  # by rank: they are started in that order
            peaks[pid] = max(peaks.get(pid, 0.0), peak_memory_mb(pid))
        time.sleep(POLL_S)
    wait_for_success(job)
    peaks = {pid: peak for pid, peak in peaks.items() if pid != job.pid or workers == 1}
    data_s, step_s = (sum(read_metric(run_dir, name).values()) for name in ("data_s", "step_s"))
    return {
        "first_step_s": round(first_step_s, 3),
        "memory_mb": [round(peaks[pid], 1) for pid in sorted(peaks)],
        "data_share": round(data_s / step_s, 5),
        "step_s": round(statistics.median(read_metric(run_dir, "step_s").values()), 4),
    }


def compare(folder: Path, on_shards: dict[str, Any], rounds: int) -> bool:
    """Print a row per run, then the differences; returns whether these are within BOUNDS."""
    kinds = {"default": dict[str, Any](), "default, 200 windows": EVAL_WINDOWS, "shards": on_shards}
    extra_s, extra_mb, shares = list[float](), list[float](), list[float]()
    for number in range(rounds):
        found = {}
        for kind in reversed(kinds) if number % 2 else kinds:
            found[kind] = measure(folder / f"{kind}-{number}", kinds[kind], 2)
            row(round=number, kind=kind, **found[kind])
        shards, default = found["shards"], found["default"]
        extra_s.append(shards["first_step_s"] - default["first_step_s"])
        pairs = zip(shards["memory_mb"], default["memory_mb"], strict=True)
        extra_mb.append(max(ours - theirs for ours, theirs in pairs))
        shares.append(shards["data_share"])
    within = True
    for name, values in zip(BOUNDS, (extra_s, extra_mb, shares), strict=True):
        median = statistics.median(values)
        row(what=name, median=round(median, 5), bound=BOUNDS[name], **spread(values, 5))
        within = within and median <= BOUNDS[name]
    return within


def stop_half_way(run_dir: Path, settings: dict[str, Any], workers: int) -> int:
    """Stop by a STOP file after half of the steps; returns the step at which the run stands."""
    job: Job = start_plain(run_dir, SETTINGS | settings, workers, 0)
    job.wait_until(lambda: last_step(run_dir) >= SETTINGS["trainer.max_steps"] // 2)
    (run_dir / "STOP").touch()
    wait_for_success(job)
    stopped = last_step(run_dir)
    assert read_history(run_dir)["status"] == "stopped" and stopped < SETTINGS["trainer.max_steps"]
    return stopped


def hashes_agree(folder: Path, settings: dict[str, Any]) -> bool:
    """Print the hash for each number of workers, and for runs that were resumed with another."""
    hashes = dict[str, str]()
    for workers in (1, 2, 3):
        run_dir = folder / f"workers-{workers}"
        wait_for_success(start_plain(run_dir, SETTINGS | settings, workers, 0))
        hashes[str(workers)] = short_hash(run_dir)
    for before, after in ((1, 3), (3, 2)):
        run_dir = folder / f"resumed-{before}-{after}"
        stopped = stop_half_way(run_dir, settings, before)
        wait_for_success(start_plain(run_dir, SETTINGS | settings, after, 0))
        hashes[f"{before}, from step {stopped} on {after}"] = short_hash(run_dir)
    row(hashes=hashes)
    return len(set(hashes.values())) == 1


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    vocab_size = len(set(TEXT.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {"data.vocab_size": vocab_size, **EVAL_WINDOWS}
        sparse = {"data.path": write_sparse_shards(folder / "sparse")} | settings
        within = compare(folder, sparse, arguments.rounds)
        linked = {"data.path": write_linked_shards(folder / "linked", vocab_size)} | settings
        one_hash = hashes_agree(folder, linked)
    return 0 if within and one_hash else 1


if __name__ == "__main__":
    sys.exit(main())
