"""Stop a job at a random moment, by all four means, many times: how long until it is gone, what is left, does it go on from that step?

    python benchmarks/stops.py                 # 40 stops of two workers: SIGTERM and SIGINT to the agent, SIGUSR1 to a worker, a STOP file

After each stop the same command is started again, until the run is finished, then a new run begins. A row a stop, as JSON: the seconds until
the last process was gone, and the newest snapshot before and after. Exit code 1 unless each stop took less than 5 s and a step, lost no step
that had a snapshot, wrote one of the step it stopped at if it had begun to train, left no process, and each run ended with the hash of an
undisturbed one.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import ROOT, alive, result

STEPS = 150
SETTINGS = [
    "data.block_size=64", "model.n_layer=2", "model.n_head=2", "model.n_embd=64", "trainer.batch_size=16", "trainer.micro_batch_size=2",
    f"trainer.max_steps={STEPS}", "trainer.eval_every=40", "trainer.log_every=1", "trainer.sample_tokens=50", "trainer.device=cpu",
    "snapshot.every=10", "trainer.timeout_s=60",
]  # fmt: skip
KINDS = ("SIGTERM", "SIGINT", "SIGUSR1", "STOP")


def start(run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py", f"run_dir={run_dir}", *SETTINGS]
    env = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    log = open(run_dir.with_suffix(".log"), "ab")  # noqa: SIM115 - the job's own
    return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=env, start_new_session=True)


def workers(agent: subprocess.Popen[bytes]) -> list[int]:
    try:
        found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        return [int(pid) for pid in found if b"train.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:
        return []  # ended in this instant


def newest(run_dir: Path) -> int:
    return max((int(path.stem[5:]) for path in run_dir.glob("snapshots/step_*.json")), default=0)


def ask(kind: str, job: subprocess.Popen[bytes], pids: list[int], run_dir: Path, dice: random.Random) -> bool:
    """Whether the request reached a living job."""
    try:
        if kind == "STOP":
            run_dir.mkdir(exist_ok=True)
            (run_dir / "STOP").touch()
        elif kind == "SIGUSR1":
            os.kill(dice.choice(pids), signal.SIGUSR1)
        else:
            os.kill(job.pid, getattr(signal, kind))
    except (ProcessLookupError, IndexError):
        return False
    return job.poll() is None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, good, done, runs = random.Random(arguments.seed), 0, 0, []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder, "undisturbed")
        began = time.monotonic()
        start(reference).wait()
        length, run_dir = time.monotonic() - began, Path(folder, "run0")
        print(json.dumps({"undisturbed": result(reference), "seconds": round(length, 1)}), flush=True)
        while done < arguments.stops:
            kind = KINDS[done % len(KINDS)]
            job, after = start(run_dir), dice.uniform(1.0, 0.8 * length)
            time.sleep(after)  # the random moment itself
            pids, before, first = workers(job), newest(run_dir), time.monotonic()
            if ask(kind, job, pids, run_dir, dice):
                job.wait(60)
                while any(alive(pid) for pid in pids) and time.monotonic() - first < 60:
                    time.sleep(0.005)
                took, done = time.monotonic() - first, done + 1
                told: dict[str, Any] = (
                    json.loads((run_dir / "run.json").read_text()) if (run_dir / "run.json").exists() else {"status": "none", "generations": []}
                )
                step_s = max((entry.get("step_s", 0.0) for entry in told["generations"]), default=0.0)
                fine = took < 5 + step_s and newest(run_dir) >= before and not any(alive(pid) for pid in pids)
                if told["status"] == "stopped":  # it had begun to train: the step it stopped at has the snapshot
                    fine = fine and newest(run_dir) == told["generations"][-1]["to_step"]
                good += fine
                row = {"stop": done, "kind": kind, "after_s": round(after, 2), "gone_s": round(took, 2), "status": told["status"]}
                row |= {"snapshot_before": before, "snapshot": newest(run_dir), "agent_code": job.returncode, "ok": fine}
                print(json.dumps(row), flush=True)
            else:
                job.wait()
            if newest(run_dir) == STEPS:
                runs.append(result(run_dir) == result(reference))
                run_dir = Path(folder, f"run{len(runs)}")
            (run_dir / "STOP").unlink(missing_ok=True)
        start(run_dir).wait()
        runs.append(result(run_dir) == result(reference))
    print(json.dumps({"stops": done, "ok": good, "runs": len(runs), "identical": sum(runs)}))
    return 0 if good == done and all(runs) else 1


if __name__ == "__main__":
    sys.exit(main())
