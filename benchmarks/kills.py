"""Kill a worker at a random moment, many times: does the job finish by itself, and with the bits of an undisturbed run?

    python benchmarks/kills.py                                    # 20 jobs of two workers, 10 jobs of two agents with one worker each
    python benchmarks/kills.py --jobs 3 --agent_jobs 0 --seed 7

Each job is started with plain torchrun and `--max-restarts=3`. One of its workers gets SIGKILL at a seeded random moment between its
start and the time an undisturbed job takes. A job counts only if the signal hit a living worker. One row a job, as JSON; exit code 1
unless every job finished with the hash of the undisturbed one.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from common import Job, result

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--agent_jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice, good, wanted = random.Random(arguments.seed), 0, arguments.jobs + arguments.agent_jobs
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        codes = Job(Path(folder, "undisturbed"), *SETTINGS, restarts=3).wait(300)
        expected, length = result(Path(folder, "undisturbed")), time.monotonic() - began
        print(json.dumps({"job": "undisturbed", "codes": codes, "seconds": round(length, 1), "hash": expected}), flush=True)
        for number in range(wanted):
            agents, hit = 1 if number < arguments.jobs else 2, False
            while not hit:  # a kill that came too late, or before there was a worker, is tried again at another moment
                run_dir = Path(folder, f"job{number}-{dice.randrange(10**9)}")
                began, after = time.monotonic(), dice.uniform(0.0, length)
                job = Job(run_dir, *SETTINGS, agents=agents, restarts=3)
                time.sleep(after)  # the random moment itself
                pids = job.workers()
                if pids:
                    try:
                        os.kill(victim := dice.choice(pids), signal.SIGKILL)
                        hit = True
                    except ProcessLookupError:
                        pass  # ended in this instant: another moment
                if not hit:
                    job.wait(300)
            codes = job.wait(300)
            told = job.told()
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
                print(job.log()[-3000:], file=sys.stderr)
    print(json.dumps({"identical": good, "of": wanted}))
    return 0 if good == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
