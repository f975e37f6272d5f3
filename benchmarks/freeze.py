"""Freeze a worker (SIGSTOP) at a random moment: when is it noticed, when does the job go on, with which bits?

    python benchmarks/freeze.py          # 10 frozen workers with timeout_s=10; then 5 minutes of false alarms
    python benchmarks/freeze.py --times 0 --minutes 0 --before 10     # frozen before the workers have met

`noticed_s` is when the first of the other workers is gone, `on_s` when the next generation has completed a
step; both in seconds since the signal. The run for false alarms trains for so many minutes beside processes
that keep all cores busy. Before the workers have met, `gone_s` is when the frozen one is gone, `patience_s`
for how long the others waited, as the next generation says.

Exit code 1 unless every freeze was noticed within timeout_s + 2 s, every job went on within timeout_s + 35 s
with the bits of an undisturbed run, the run beside the busy processes had a single generation, and every
worker that was frozen before the meeting was named, and gone within `patience_s` and the others' start, of
`--start_s` at most.
"""

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import exit_codes, row, short_hash, start

from mingpt.tools.jobs import Job, is_alive, last_step, read_history

STEPS = 150
SETTINGS = {
    "trainer.log_every": 1,
    "trainer.sample_tokens": 50,
    "trainer.eval_every": 50,
    "trainer.device": "cpu",
}


def freeze_one(job: Job, run_dir: Path, timeout_s: float, rng: random.Random) -> dict[str, float]:
    """Freeze a random worker; returns for the row which, when, and the seconds to what followed."""
    pids = job.workers()
    victim = rng.choice(pids)
    os.kill(victim, signal.SIGSTOP)
    began, step = time.monotonic(), last_step(run_dir)
    limit_s = timeout_s + 60

    def others_are_gone() -> bool:
        return not all(is_alive(pid) for pid in pids if pid != victim)

    def goes_on() -> bool:
        generations = read_history(run_dir)["generations"]
        return len(generations) > 1 and last_step(run_dir) > generations[-1]["from_step"]

    job.wait_until(others_are_gone, limit_s)
    noticed_s = time.monotonic() - began
    job.wait_until(lambda: not is_alive(victim), limit_s)
    gone_s = time.monotonic() - began
    job.wait_until(goes_on, limit_s)
    on_s = time.monotonic() - began
    return {
        "victim": pids.index(victim),
        "at_step": step,
        "noticed_s": round(noticed_s, 2),
        "gone_s": round(gone_s, 2),
        "on_s": round(on_s, 2),
    }


def is_recovered(
    folder: Path, number: int, timeout_s: float, workers: int, expected: str, rng: random.Random
) -> bool:
    """Run a job and freeze one of its workers; whether it went on in time and has the expected hash."""
    run_dir = folder / f"frozen{number}"
    settings = SETTINGS | {"trainer.max_steps": STEPS, "trainer.timeout_s": timeout_s}
    job = start(run_dir, settings, workers=workers, restarts=3)
    step = rng.randrange(2, STEPS - 20)
    job.wait_until(lambda: last_step(run_dir) >= step, 300)
    time.sleep(rng.uniform(0, 0.3))  # anywhere in a step
    frozen = freeze_one(job, run_dir, timeout_s, rng)
    codes = exit_codes([job], 300)
    is_in_time = frozen["noticed_s"] <= timeout_s + 2 and frozen["on_s"] <= timeout_s + 35
    is_good = is_in_time and codes == [0] and short_hash(run_dir) == expected
    generations = read_history(run_dir)["generations"]
    ends = [entry["end"] for entry in generations]
    from_steps = [entry["from_step"] for entry in generations]
    row(
        frozen=number,
        workers=workers,
        **frozen,
        ends=ends,
        from_steps=from_steps,
        hash=short_hash(run_dir),
        ok=is_good,
    )
    if not is_good:
        print(job.err()[-3000:], file=sys.stderr)
    return is_good


def given_up(
    folder: Path, number: int, limits: tuple[float, float], expected: str, rng: random.Random
) -> bool | None:
    """Freeze a worker before the meeting; whether it was given up in time. None if they had met by then."""
    run_dir, (timeout_s, start_s) = folder / f"before{number}", limits
    settings = SETTINGS | {"trainer.max_steps": STEPS, "trainer.timeout_s": timeout_s}
    workers = 2 + number % 2
    job = start(run_dir, settings, workers=workers, restarts=1)
    job.wait_until(lambda: len(job.workers()) == workers)
    time.sleep(rng.uniform(0, 1.5))  # the random moment itself
    pids = job.workers()
    victim = rng.choice(pids)
    os.kill(victim, signal.SIGSTOP)
    began = time.monotonic()
    time.sleep(0.5)  # they meet and open log.txt, or they do not
    if (run_dir / "log.txt").exists():
        job.kill()
        return None
    job.wait_until(lambda: not is_alive(victim), 120)
    gone_s = time.monotonic() - began
    codes = exit_codes([job], 300)
    named = re.search(r"worker (\d) did not reach the rendezvous within ([\d.]+) s", job.err())
    patience_s = float(named[2]) if named else 0.0
    is_named = named is not None and int(named[1]) == pids.index(victim)
    is_good = is_named and gone_s <= patience_s + start_s and patience_s <= max(timeout_s, 3 * start_s)
    is_good = is_good and codes == [0] and short_hash(run_dir) == expected
    found = {"workers": workers, "victim": pids.index(victim), "gone_s": round(gone_s, 2)}
    row(before=number, **found, patience_s=patience_s, hash=short_hash(run_dir), ok=is_good)
    if not is_good:
        print(job.err()[-3000:], file=sys.stderr)
    return is_good


def has_no_false_alarm(folder: Path, minutes: float, timeout_s: float, busy: int) -> bool:
    """A run with many evaluations and snapshots, beside processes that do nothing but compute."""
    run_dir = folder / "busy"
    settings = SETTINGS | {"trainer.max_steps": 100_000, "trainer.timeout_s": timeout_s, "snapshot.every": 10}
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        job = start(run_dir, settings, restarts=3)
        began = time.monotonic()
        while job.is_running() and time.monotonic() - began < 60 * minutes:
            time.sleep(0.5)
        was_running = job.is_running()
        (run_dir / "STOP").touch()
        codes = exit_codes([job], 300)
    finally:
        for other in others:
            other.kill()
            other.wait()
    generations = read_history(run_dir)["generations"]
    is_good = was_running and codes == [0] and len(generations) == 1
    steps = generations[-1]["to_step"]
    limits = {"busy": busy, "minutes": minutes, "timeout_s": timeout_s}
    row(**limits, steps=steps, generations=len(generations), ok=is_good)
    return is_good


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--before", type=int, default=10, help="workers frozen before they have met")
    parser.add_argument("--start_s", type=float, default=8, help="that a worker's start takes at most")
    parser.add_argument("--timeout_s", type=float, default=10)
    parser.add_argument("--minutes", type=float, default=5, help="of the run for false alarms; 0 for none")
    parser.add_argument("--busy", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, timeout_s = random.Random(arguments.seed), arguments.timeout_s
    good, is_quiet, tries, verdicts = 0, True, 0, list[bool]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        undisturbed = folder / "undisturbed"
        codes = exit_codes([start(undisturbed, SETTINGS | {"trainer.max_steps": STEPS})], 600)
        expected = short_hash(undisturbed)
        row(undisturbed=expected, codes=codes)
        for number in range(arguments.times):
            good += is_recovered(folder, number, timeout_s, 2 + number % 2, expected, rng)
        while len(verdicts) < arguments.before:
            tries += 1
            verdict = given_up(folder, tries, (timeout_s, arguments.start_s), expected, rng)
            verdicts += [] if verdict is None else [verdict]
        if arguments.minutes:
            is_quiet = has_no_false_alarm(folder, arguments.minutes, timeout_s, arguments.busy)
    row(
        frozen=arguments.times, ok=good, no_false_alarm=is_quiet, before=len(verdicts), given_up=sum(verdicts)
    )
    return 0 if good == arguments.times and is_quiet and all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
