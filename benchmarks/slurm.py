"""launch/slurm/ on a real slurmctld with two slurmd on this machine: same bits, whatever happens to the job?

    python benchmarks/slurm.py    # 13 jobs, many minutes: Slurm waits two before each new start
    python benchmarks/slurm.py --cases cancel down

- one, several: jobs on one node and on two that nothing disturbs.
- limit: a time limit of one minute, with the signal before it; nobody but the script queues the job again.
- preempt: preempted twice for a job of higher priority, with the wait of Slurm before each new start.
- cancel: scancel at a random moment; a snapshot of the last step and no process must be left, and a new job
  must go on from there.
- down: a node dies with all its processes and is set down, at a random moment. Of the second node (`n2`) the
  job must go on with the other; with the first (`n1`) dies the script, so the job is queued again.

A row each, as JSON. Exit code 1 unless each run ended with the bits of a single process and went on from the
step that it had a snapshot of. Needs Debian's slurm-wlm.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import Settings, arguments_of, row, short_hash, wait_for_success

from mingpt.tools.jobs import ROOT, Job, last_step, read_history

sys.path.append(str(ROOT / "tests"))
from support.slurm import MISSING, SlurmCluster

STEPS = 400
SETTINGS = {
    "data.block_size": 32, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32,
    "trainer.batch_size": 32, "trainer.micro_batch_size": 1, "trainer.max_steps": STEPS,
    "trainer.eval_every": 200, "trainer.log_every": 1, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 60, "snapshot.every": 1000,
}  # fmt: skip
PARTITIONS = (
    "main Default=YES PriorityTier=1 GraceTime=60 PreemptMode=REQUEUE",
    "urgent PriorityTier=10 PreemptMode=OFF",
)
SLURM = {
    "PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE", "SlurmdTimeout": 10,
    "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=100000",
}  # fmt: skip
END = ("COMPLETED", "FAILED", "TIMEOUT", "NODE_FAIL", "CANCELLED", "PREEMPTED")
WAIT_S = 900.0
TIMES = {"one": 1, "several": 1, "limit": 1, "preempt": 1, "cancel": 6, "down": 3}


class Bench:
    """A cluster, and the cases; each returns what its row says and whether all was as it must be."""

    def __init__(self, cluster: SlurmCluster, folder: Path, rng: random.Random, limit_steps: int) -> None:
        self.cluster, self.folder, self.rng, self.limit_steps = cluster, folder, rng, limit_steps
        self.runs = 0
        self.run_dir = folder / "run0"

    def submit(self, script: str, *options: str, again: bool = False, more: Settings | None = None) -> int:
        """In a new run_dir, or again in the last one."""
        self.runs += not again
        self.run_dir = self.folder / f"run{self.runs}"
        settings: Settings = SETTINGS | dict(more or {}) | {"run_dir": self.run_dir, "trainer.workers": 2}
        words = ("--cpus-per-task=1", f"--output={self.run_dir}.out", *options)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        place = str(self.folder / "rendezvous")
        script = f"launch/slurm/{script}.sbatch"
        return self.cluster.submit(*words, script, *arguments_of(settings), PATH=path, RENDEZVOUS=place)

    def wait_for_moment(self, after: int) -> int:
        """Until a random step from `after` on; returns the last step on record."""
        step = after + self.rng.randrange(5, 60)
        self.cluster.wait_until(lambda: last_step(self.run_dir) >= step, WAIT_S)
        return last_step(self.run_dir)

    def wait_for_restart(self, job: int, number: int) -> None:
        self.cluster.wait_until(lambda: self.cluster.job(job)["Restarts"] == str(number), WAIT_S)

    def finish(self, job: int) -> dict[str, Any]:
        state = self.cluster.wait_for_state(job, *END, timeout_s=WAIT_S)
        history = read_history(self.run_dir)
        ends = [generation["end"] for generation in history["generations"]]
        restarts = int(self.cluster.job(job)["Restarts"])
        return {
            "state": state,
            "restarts": restarts,
            "ends": ends,
            "steps_lost": history["steps_lost"],
            "hash": short_hash(self.run_dir),
            "ok": state == "COMPLETED",
        }

    def one(self) -> dict[str, Any]:
        return self.finish(self.submit("one_node", "--cpus-per-task=2"))

    def several(self) -> dict[str, Any]:
        return self.finish(self.submit("several_nodes"))

    def limit(self) -> dict[str, Any]:
        """Slurm looks at times every 30 s and may send the signal a minute early."""
        more = {"trainer.max_steps": self.limit_steps}
        result = self.finish(
            self.submit("preemptible", "--nodes=2", "--time=1", "--signal=B:USR1@30", more=more)
        )
        result["ok"] = result["ok"] and result["restarts"] > 0 and result["steps_lost"] == 0
        return result

    def preempt(self) -> dict[str, Any]:
        job = self.submit("preemptible", "--nodes=2")
        step = 0
        for restarts in (1, 2):
            step = self.wait_for_moment(step)
            self.cluster.submit(
                "--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true", "--output=/dev/null"
            )
            self.wait_for_restart(job, restarts)
        result = self.finish(job)
        result["ok"] = result["ok"] and result["restarts"] == 2 and result["steps_lost"] == 0
        return result

    def cancel(self) -> dict[str, Any]:
        script = self.rng.choice(["one_node", "several_nodes", "preemptible"])
        job = self.submit(script)
        self.wait_for_moment(0)
        began = time.monotonic()
        self.cluster.run("scancel", str(job))
        self.cluster.wait_until(lambda: not self.cluster.job_pids(), WAIT_S)
        gone_s = time.monotonic() - began
        state = self.cluster.wait_for_state(job, "CANCELLED")
        history = read_history(self.run_dir)
        stopped_at = history["generations"][-1]["to_step"]
        snapshots = [int(path.stem[5:]) for path in self.run_dir.glob("snapshots/step_*.json")]
        result = self.finish(self.submit(script, again=True))
        is_good = history["status"] == "stopped" and snapshots == [stopped_at] and result["steps_lost"] == 0
        result |= {
            "script": script,
            "first_state": state,
            "gone_s": round(gone_s, 2),
            "stopped_at": stopped_at,
        }
        result["ok"] = result["ok"] and is_good
        return result

    def down(self) -> dict[str, Any]:
        node = self.cluster.nodes[-1 - self.runs % 2]
        job = self.submit("several_nodes", more={"snapshot.every": 20})
        step = self.wait_for_moment(0)
        self.cluster.kill_node(node)
        self.cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        if node == "n1":  # a job of two nodes needs it again
            self.cluster.start_node(node)
        result = self.finish(job)
        if node != "n1":
            self.cluster.start_node(node)
        result |= {"node": node, "killed_at": step}
        result["ok"] = result["ok"] and result["restarts"] == (node == "n1")
        return result


def run_case(bench: Bench, case: str, expected: str) -> dict[str, Any]:
    """Print its row, and the log of a run that is not as it must be."""
    began = time.monotonic()
    run: Callable[[], dict[str, Any]] = getattr(bench, case)
    result = run()
    result["ok"] = result["ok"] and result["hash"] == expected
    row(case=case, seconds=round(time.monotonic() - began, 1), **result)
    if not result["ok"]:
        sys.stderr.write(Path(f"{bench.run_dir}.out").read_text()[-3000:])
    return result


def single_hash(folder: Path, steps: int) -> str:
    """Of a run of one process that nothing disturbs."""
    settings = SETTINGS | {
        "run_dir": folder / f"single{steps}",
        "trainer.workers": 1,
        "trainer.max_steps": steps,
    }
    wait_for_success(Job([sys.executable, "train.py", *arguments_of(settings)], folder / f"single{steps}"))
    return short_hash(folder / f"single{steps}")


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--cases", nargs="+", choices=list(TIMES), default=list(TIMES))
    parser.add_argument(
        "--limit_steps", type=int, default=4000, help="of the case limit: over a minute's work"
    )
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    if MISSING:
        sys.stderr.write(f"error: no {', '.join(MISSING)}; on Debian: apt install slurm-wlm\n")
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder, good, done = Path(name), 0, 0
        with SlurmCluster(folder / "slurm", settings=SLURM, partitions=PARTITIONS) as cluster:
            bench = Bench(cluster, folder, random.Random(arguments.seed), arguments.limit_steps)
            for case in arguments.cases:
                steps = arguments.limit_steps if case == "limit" else STEPS
                expected = single_hash(folder, steps)
                for _ in range(TIMES[case]):
                    result = run_case(bench, case, expected)
                    done, good = done + 1, good + result["ok"]
    row(jobs=done, ok=good)
    return 0 if good == done else 1


if __name__ == "__main__":
    sys.exit(main())
