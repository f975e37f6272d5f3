"""Stop a job at a random moment: how long until it is gone, what is left, does it go on from there?

    python benchmarks/stops.py        # 40 stops

In turns by SIGTERM and SIGINT to the agent, SIGUSR1 to a worker and a STOP file. After each stop the same
command is started again, until the run is finished; then a new run begins. A row per stop, as JSON: the
seconds until the last process was gone, and the newest snapshot before and after. Exit code 1 unless each
stop took less than 5 s and a step, lost no step that had a snapshot, wrote one of the step it stopped at if
it had begun to train, left no process, and each run ended with the hash of an undisturbed one.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import row, short_hash, start

from mingpt.jobs import Job, is_alive, read_history

STEPS = 150
SETTINGS = {
    "data.block_size": 64, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 64,
    "trainer.batch_size": 16, "trainer.micro_batch_size": 2, "trainer.max_steps": STEPS,
    "trainer.eval_every": 40, "trainer.log_every": 1, "trainer.sample_tokens": 50, "trainer.device": "cpu",
    "trainer.timeout_s": 60, "snapshot.every": 10,
}  # fmt: skip
KINDS = ("SIGTERM", "SIGINT", "SIGUSR1", "STOP")


def newest_step(run_dir: Path) -> int:
    """Of the snapshots of a run; 0 if there is none."""
    return max((int(path.stem[5:]) for path in run_dir.glob("snapshots/step_*.json")), default=0)


def request_stop(kind: str, job: Job, pids: list[int], run_dir: Path, rng: random.Random) -> bool:
    """Whether the request reached a running job."""
    try:
        if kind == "STOP":
            run_dir.mkdir(exist_ok=True)
            (run_dir / "STOP").touch()
        elif kind == "SIGUSR1":
            os.kill(rng.choice(pids), signal.SIGUSR1)
        else:
            os.kill(job.pid, signal.Signals[kind])
    except (ProcessLookupError, IndexError):
        return False
    return job.is_running()


def stop_once(run_dir: Path, kind: str, after_s: float, rng: random.Random) -> dict[str, Any] | None:
    """Start a job and stop it after so long; returns the row of it, None if the request came too late."""
    job = start(run_dir, SETTINGS)
    time.sleep(after_s)  # the random moment itself
    pids, before, began = job.workers(), newest_step(run_dir), time.monotonic()
    if not request_stop(kind, job, pids, run_dir, rng):
        job.wait()
        return None
    code = job.wait(60)
    while any(is_alive(pid) for pid in pids) and time.monotonic() - began < 60:
        time.sleep(0.005)
    took = time.monotonic() - began
    history, newest = read_history(run_dir), newest_step(run_dir)
    step_s = max((entry.get("step_s", 0.0) for entry in history["generations"]), default=0.0)
    is_good = took < 5 + step_s and newest >= before and not any(is_alive(pid) for pid in pids)
    if history["status"] == "stopped":  # it had begun to train: the step it stopped at has the snapshot
        is_good = is_good and newest == history["generations"][-1]["to_step"]
    return {
        "kind": kind,
        "after_s": round(after_s, 2),
        "gone_s": round(took, 2),
        "status": history["status"],
        "snapshot_before": before,
        "snapshot": newest,
        "agent_code": code,
        "ok": is_good,
    }


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, done, good, is_same = random.Random(arguments.seed), 0, 0, list[bool]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        began = time.monotonic()
        start(folder / "undisturbed", SETTINGS).wait(600)
        length_s, expected = time.monotonic() - began, short_hash(folder / "undisturbed")
        row(undisturbed=expected, seconds=round(length_s, 1))
        run_dir = folder / "run0"
        while done < arguments.stops:
            kind, after_s = KINDS[done % len(KINDS)], rng.uniform(1.0, 0.8 * length_s)
            stopped = stop_once(run_dir, kind, after_s, rng)
            if stopped:
                done += 1
                good += stopped["ok"]
                row(stop=done, **stopped)
            if newest_step(run_dir) == STEPS:
                is_same.append(short_hash(run_dir) == expected)
                run_dir = folder / f"run{len(is_same)}"
            (run_dir / "STOP").unlink(missing_ok=True)
        start(run_dir, SETTINGS).wait(600)
        is_same.append(short_hash(run_dir) == expected)
    row(stops=done, ok=good, runs=len(is_same), identical=sum(is_same))
    return 0 if good == done and all(is_same) else 1


if __name__ == "__main__":
    sys.exit(main())
