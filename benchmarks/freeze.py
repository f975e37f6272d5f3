"""Freeze a worker (SIGSTOP) at a random moment: when do the others notice, when does the job go on, with which bits? And is anybody accused falsely?

    python benchmarks/freeze.py                    # 10 frozen workers with timeout_s=10; then 5 minutes beside four busy processes

Noticed is when the first of the other workers is gone, on is when the next generation has completed a step; both in seconds since the signal. Exit
code 1 unless all were noticed within timeout_s + 2 s, all went on within timeout_s + 35 s with the bits of an undisturbed run, and the run
beside the busy processes had a single generation.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import Job, alive, result, row

STEPS = 150
SETTINGS = ["trainer.log_every=1", "trainer.sample_tokens=50", "trainer.eval_every=50", "trainer.device=cpu"]


def frozen(folder: Path, number: int, timeout_s: float, workers: int, dice: random.Random, expected: str) -> bool:
    job = Job(folder / f"frozen{number}", *SETTINGS, f"trainer.max_steps={STEPS}", f"trainer.timeout_s={timeout_s}", workers=workers, restarts=3)
    at = dice.randrange(2, STEPS - 20)
    job.until(lambda: max(job.steps(), default=0) >= at, 300)
    time.sleep(dice.uniform(0, 0.3))  # anywhere in a step
    pids = job.workers()
    victim = dice.choice(pids)
    os.kill(victim, signal.SIGSTOP)
    began, reached = time.monotonic(), max(job.steps())
    noticed = job.until(lambda: not all(alive(pid) for pid in pids if pid != victim), timeout_s + 60) - began
    gone = job.until(lambda: not alive(victim), timeout_s + 60) - began
    job.until(lambda: len(job.told()["generations"]) > 1 and max(job.steps()) > job.told()["generations"][-1]["from_step"], timeout_s + 60)
    on = time.monotonic() - began
    codes = job.wait(300)
    told = job.told()["generations"]
    fine = noticed <= timeout_s + 2 and on <= timeout_s + 35 and codes == [0] and result(job.run_dir) == expected
    about = {"frozen": number, "workers": workers, "victim": pids.index(victim), "at_step": reached}
    times = {"noticed_s": round(noticed, 2), "gone_s": round(gone, 2), "on_s": round(on, 2)}
    row(**about, **times, ends=[entry["end"] for entry in told], from_steps=[entry["from_step"] for entry in told], hash=result(job.run_dir), ok=fine)
    if not fine:
        print(job.log()[-3000:], file=sys.stderr)
    return fine


def beside_busy(folder: Path, minutes: float, timeout_s: float, busy: int) -> bool:
    """A run with many evaluations and snapshots, beside processes that do nothing but compute."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        job = Job(folder / "busy", *SETTINGS, "trainer.max_steps=100000", f"trainer.timeout_s={timeout_s}", "snapshot.every=10", restarts=3)
        began = time.monotonic()
        while job.running() and time.monotonic() - began < 60 * minutes:
            time.sleep(0.5)
        fine = job.running()
        (folder / "busy" / "STOP").touch()
        codes = job.wait(300)
    finally:
        for other in others:
            other.kill()
            other.wait()
    told = job.told()
    fine = fine and codes == [0] and len(told["generations"]) == 1
    row(busy=busy, minutes=minutes, timeout_s=timeout_s, steps=told["generations"][-1]["to_step"], generations=len(told["generations"]), ok=fine)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--timeout_s", type=float, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--busy", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    dice = random.Random(arguments.seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = Job(folder / "undisturbed", *SETTINGS, f"trainer.max_steps={STEPS}")
        codes = undisturbed.wait(600)
        expected = result(undisturbed.run_dir)
        row(undisturbed=expected, codes=codes)
        good = [frozen(folder, number, arguments.timeout_s, 2 + number % 2, dice, expected) for number in range(arguments.times)]
        quiet = arguments.minutes == 0 or beside_busy(folder, arguments.minutes, arguments.timeout_s, arguments.busy)
    row(frozen=len(good), ok=sum(good), no_false_alarm=quiet)
    return 0 if all(good) and quiet else 1


if __name__ == "__main__":
    sys.exit(main())
