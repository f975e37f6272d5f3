"""A storm: workers are killed and frozen at random for as long as it is told to; then the ledger, the goodput and the bits.

    python benchmarks/storm.py                             # 10 minutes, a blow every 30 s on average, two workers
    python benchmarks/storm.py --minutes 480 --every_s 120 --workers 4 --freeze 0.2

First the same run undisturbed, which says how long its steps take and which bits there must be. A row a blow, as JSON. `goodput` is
the time that the steps take undisturbed over the time they took in the storm; the ledger's own figure beside it. Exit code 1 unless
goodput is at least `--least` and the bits are the same.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from common import Job, result, row

PROBE_STEPS = 120


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10, help="how long the storm takes, about")
    parser.add_argument("--every_s", type=float, default=30, help="mean time between blows, exponentially distributed")
    parser.add_argument("--freeze", type=float, default=0.0, help="share of blows that freeze a worker (SIGSTOP) instead of killing it")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout_s", type=float, default=10)
    parser.add_argument("--least", type=float, default=0.85)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    arguments = parser.parse_intermixed_args()
    dice = random.Random(arguments.seed)
    settings = [
        "trainer.eval_every=500",
        "trainer.device=cpu",
        f"trainer.timeout_s={arguments.timeout_s}",
        "snapshot.keep_last=2",
        *arguments.settings,
    ]
    with tempfile.TemporaryDirectory() as name:
        probe = Job(Path(name, "probe"), *settings, f"trainer.max_steps={PROBE_STEPS}", workers=arguments.workers)
        probe.wait(3600)
        step_s = probe.told()["generations"][-1]["step_s"]
        steps = int(0.9 * 60 * arguments.minutes / step_s)
        calm = Job(Path(name, "calm"), *settings, f"trainer.max_steps={steps}", workers=arguments.workers)
        calm.until(lambda: bool(calm.told()["generations"]), 600)
        codes = calm.wait(24 * 3600)
        entry = calm.told()["generations"][-1]
        calm_s, expected = entry["seen"] - entry["began"], result(calm.run_dir)
        row(undisturbed=expected, codes=codes, steps=steps, seconds=round(calm_s, 1))
        job = Job(Path(name, "storm"), *settings, f"trainer.max_steps={steps}", workers=arguments.workers, restarts=100_000)
        job.until(lambda: bool(job.told()["generations"]), 600)
        began = job.told()["generations"][0]["began"]
        next_blow, blows = time.time() + dice.expovariate(1 / arguments.every_s), 0
        while job.running():
            time.sleep(0.05)
            if time.time() < next_blow or not (pids := job.workers()):
                continue
            victim, kind = dice.choice(pids), signal.SIGSTOP if dice.random() < arguments.freeze else signal.SIGKILL
            try:
                os.kill(victim, kind)
            except ProcessLookupError:
                continue  # it ended in this instant; the next look finds another
            blows += 1
            row(blow=blows, at_s=round(time.time() - began, 1), signal=kind.name, worker=pids.index(victim), step=max(job.steps(), default=0))
            next_blow += dice.expovariate(1 / arguments.every_s)
        codes, told = job.wait(1), job.told()
        took = told["generations"][-1]["seen"] - began
        final, goodput = result(job.run_dir), calm_s / took
        same = final == expected and codes == [0]
        for generation in told["generations"]:
            row(**{key: generation.get(key) for key in ("workers", "from_step", "to_step", "end")})
    ledger = {key: told[key] for key in ("status", "steps_lost", "seconds_lost", "goodput")}
    row(blows=blows, seconds=round(took, 1), goodput=round(goodput, 4), ledger=ledger, hash=final, identical=same)
    return 0 if same and goodput >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
