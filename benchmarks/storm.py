"""Kill and freeze workers at random for many minutes: what is the goodput, and are the bits the same?

    python benchmarks/storm.py                       # 10 minutes, a signal every 30 s on average, two workers
    python benchmarks/storm.py --minutes 480 --every_s 120 --workers 4 --freeze 0.2

First the same run undisturbed, which says how long its steps take and which bits are expected. A row per
signal, as JSON. `goodput` is the time that the steps take undisturbed over the time that they took;
`run_json` is what run.json says of the disturbed run. Exit code 1 unless goodput is at least `--least` and
the bits are the same.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Settings, exit_codes, row, short_hash, signal_one, start

from mingpt.tools.jobs import last_step, read_history

PROBE_STEPS = 120
DAY_S = 24 * 3600


def parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--minutes", type=float, default=10, help="about how long the disturbed run takes")
    parser.add_argument(
        "--every_s", type=float, default=30, help="mean time between signals, exponentially distributed"
    )
    parser.add_argument("--freeze", type=float, default=0.0, help="fraction of signals that are SIGSTOP")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--timeout_s", type=float, default=10)
    parser.add_argument("--least", type=float, default=0.85, help="goodput to be reached")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="further settings of the run")
    return parser.parse_intermixed_args()


def count_steps(folder: Path, settings: Settings, arguments: argparse.Namespace) -> int:
    """How many steps take about nine tenths of the minutes asked for, from a short run."""
    probe = folder / "probe"
    given = {**settings, "trainer.max_steps": PROBE_STEPS}
    start(probe, given, *arguments.settings, workers=arguments.workers).wait(3600)
    step_s = read_history(probe)["generations"][-1]["step_s"]
    return int(0.9 * 60 * arguments.minutes / step_s)


def train_undisturbed(folder: Path, settings: Settings, arguments: argparse.Namespace) -> tuple[float, str]:
    """Seconds from the start of training to its end, and the hash."""
    run_dir = folder / "undisturbed"
    job = start(run_dir, settings, *arguments.settings, workers=arguments.workers)
    codes = exit_codes([job], DAY_S)
    entry = read_history(run_dir)["generations"][-1]
    seconds = entry["seen"] - entry["began"]
    steps = settings["trainer.max_steps"]
    row(undisturbed=short_hash(run_dir), codes=codes, steps=steps, seconds=round(seconds, 1))
    return seconds, short_hash(run_dir)


def train_disturbed(run_dir: Path, settings: Settings, arguments: argparse.Namespace) -> tuple[int, int]:
    """Send signals until the run ends; returns its exit code and the number of signals."""
    rng = random.Random(arguments.seed)
    job = start(run_dir, settings, *arguments.settings, workers=arguments.workers, restarts=100_000)
    job.wait_until(lambda: read_history(run_dir)["generations"], 600)
    began = read_history(run_dir)["generations"][0]["began"]
    next_at, signals = time.time() + rng.expovariate(1 / arguments.every_s), 0
    while job.is_running():
        time.sleep(0.05)
        pids = job.workers()
        if time.time() < next_at or not pids:
            continue
        number = signal.SIGSTOP if rng.random() < arguments.freeze else signal.SIGKILL
        victim = signal_one(pids, number, rng)
        if victim is None:
            continue  # it ended in this instant; the next look finds another
        signals += 1
        at_s = round(time.time() - began, 1)
        row(number=signals, at_s=at_s, signal=number.name, worker=victim, step=last_step(run_dir))
        next_at += rng.expovariate(1 / arguments.every_s)
    return job.wait(), signals


def main() -> int:
    arguments = parse_arguments()
    settings: dict[str, Any] = {
        "trainer.eval_every": 500,
        "trainer.device": "cpu",
        "trainer.timeout_s": arguments.timeout_s,
        "snapshot.keep_last": 2,
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings["trainer.max_steps"] = count_steps(folder, settings, arguments)
        undisturbed_s, expected = train_undisturbed(folder, settings, arguments)
        run_dir = folder / "disturbed"
        code, signals = train_disturbed(run_dir, settings, arguments)
        history, final = read_history(run_dir), short_hash(run_dir)
    generations = history["generations"]
    for generation in generations:
        row(**{key: generation.get(key) for key in ("workers", "from_step", "to_step", "end")})
    seconds = generations[-1]["seen"] - generations[0]["began"]
    goodput = undisturbed_s / seconds
    is_same = final == expected and code == 0
    row(
        signals=signals,
        seconds=round(seconds, 1),
        goodput=round(goodput, 4),
        run_json={key: history[key] for key in ("status", "steps_lost", "seconds_lost", "goodput")},
        hash=final,
        identical=is_same,
    )
    return 0 if is_same and goodput >= arguments.least else 1


if __name__ == "__main__":
    sys.exit(main())
