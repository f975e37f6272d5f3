"""Kill a worker at a random moment, many times: does the job finish by itself, and with the bits of an undisturbed run?

    python benchmarks/kills.py                                    # 20 jobs of two workers, 10 jobs of two agents with one worker each
    python benchmarks/kills.py --jobs 3 --agent_jobs 0 --seed 7

Each job is started with plain torchrun and `--max-restarts=3`. One of its workers gets SIGKILL at a seeded random moment between its
start and the time an undisturbed job takes. A job counts only if the signal hit a living worker. One row a job, as JSON; exit code 1
unless every job finished with the hash of the undisturbed one.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "data.block_size=32",
    "model.n_layer=2",
    "model.n_head=2",
    "model.n_embd=32",
    "trainer.batch_size=8",
    "trainer.micro_batch_size=1",
    "trainer.max_steps=400",
    "trainer.eval_every=100",
    "trainer.log_every=10",
    "trainer.sample_tokens=0",
    "snapshot.every=20",
    "trainer.timeout_s=60",
    "trainer.device=cpu",
]


def start(run_dir: Path, agents: int) -> list[subprocess.Popen[bytes]]:
    """A job of two workers under one agent or two."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = (
        ["--standalone"] if agents == 1 else [f"--nnodes={agents}", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{port}", "--rdzv_id=kills"]
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        *meeting,
        f"--nproc_per_node={2 // agents}",
        "--max-restarts=3",
        "train.py",
        f"run_dir={run_dir}",
        *SETTINGS,
    ]
    return [
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=open(run_dir.with_suffix(f".{agent}.log"), "wb"),
            env={key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"},
        )
        for agent in range(agents)
    ]


def workers(agent: subprocess.Popen[bytes]) -> list[int]:
    """Process ids of an agent's workers."""
    found = []
    try:
        for child in Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split():
            if b"train.py" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    except OSError:
        pass  # the agent or its child has just ended
    return sorted(found)


def wait(agents: list[subprocess.Popen[bytes]], limit_s: float) -> list[int | None]:
    """Exit codes; None for an agent that was not done in time and was killed."""
    deadline = time.monotonic() + limit_s
    codes: list[int | None] = []
    for agent in agents:
        try:
            codes.append(agent.wait(max(0.1, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            for pid in workers(agent):
                os.kill(pid, signal.SIGKILL)
            agent.kill()
            agent.wait()
            codes.append(None)
    return codes


def result(run_dir: Path) -> str:
    path = run_dir / "snapshots" / "step_00000400.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "none"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--agent_jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, good, wanted = random.Random(arguments.seed), 0, arguments.jobs + arguments.agent_jobs
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        codes = wait(start(Path(folder, "undisturbed"), 1), 300)
        expected, length = result(Path(folder, "undisturbed")), time.monotonic() - began
        print(json.dumps({"job": "undisturbed", "codes": codes, "seconds": round(length, 1), "hash": expected}), flush=True)
        for number in range(wanted):
            agents, hit = 1 if number < arguments.jobs else 2, False
            while not hit:  # a kill that came too late, or before there was a worker, is tried again at another moment
                run_dir = Path(folder, f"job{number}-{dice.randrange(10**9)}")
                began, after = time.monotonic(), dice.uniform(0.0, length)
                job = start(run_dir, agents)
                time.sleep(after)  # the random moment itself
                pids = [pid for agent in job for pid in workers(agent)]
                if pids:
                    try:
                        os.kill(victim := dice.choice(pids), signal.SIGKILL)
                        hit = True
                    except ProcessLookupError:
                        pass  # ended in this instant: another moment
                if not hit:
                    wait(job, 300)
            codes = wait(job, 300)
            told = json.loads((run_dir / "run.json").read_text()) if (run_dir / "run.json").exists() else {"generations": []}
            same = codes == [0] * agents and result(run_dir) == expected
            good += same
            print(
                json.dumps(
                    {
                        "job": number,
                        "agents": agents,
                        "kill_after_s": round(after, 2),
                        "victim": pids.index(victim),
                        "codes": codes,
                        "seconds": round(time.monotonic() - began, 1),
                        "ends": [entry["end"] for entry in told["generations"]],
                        "from": [entry["from_step"] for entry in told["generations"]],
                        "hash": result(run_dir),
                        "same": same,
                    }
                ),
                flush=True,
            )
            if not same:
                for log in sorted(run_dir.parent.glob(f"{run_dir.name}.*.log")):
                    print(log.read_text()[-3000:], file=sys.stderr)
    print(json.dumps({"identical": good, "of": wanted}))
    return 0 if good == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
