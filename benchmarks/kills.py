"""Workers killed at random moments: does the job finish by itself, with the bits of an undisturbed run?

    python benchmarks/kills.py                                           # 50 jobs, half an hour on two cores
    python benchmarks/kills.py --jobs 1 --agent_jobs 0 --plain_jobs 0    # one job, half a minute
    python benchmarks/kills.py --jobs 0 --agent_jobs 0 --plain_jobs 0 --memory_jobs 20    # in memory
    python benchmarks/kills.py --storm 5000 --every_s 30                 # twice 10 minutes

All jobs have two workers: 20 jobs under torchrun, 10 under two agents of torchrun, and 20 under plain
`python train.py`. One worker gets SIGKILL at a random moment. A job counts only if the signal hit a
living worker. --memory_jobs N adds N jobs with ddp and N jobs with fsdp that save only to memory before
their end. For these jobs the signal waits until a save to memory is under way.

With --storm STEPS, workers of the default run with this many steps are killed, one every --every_s seconds on
average. `goodput` is the time of an undisturbed run divided by the time of this run.

Prints a row per job or signal, as JSON. Exit code 1 unless every job finished with the hash of the
undisturbed run. In a storm, goodput must also be at least `--least`. Needs Linux.
"""

import argparse
import random
import signal
import sys
import time
from pathlib import Path

import common
from support.jobs import Job, last_step, read_history

SETTINGS = common.SMALL | {
    "trainer.max_steps": 400, "trainer.eval_every": 100, "trainer.log_every": 10, "snapshot.every": 20,
}  # fmt: skip
IN_MEMORY = SETTINGS | {
    "trainer.max_steps": 100, "trainer.eval_every": 1000, "trainer.eval_at_start": False, "model.n_embd": 64,
    "snapshot.every": 1000, "snapshot.memory_every": 2, "data.val_fraction": 0.01,
}  # fmt: skip
RESTARTS, TIMEOUT_S, DAY_S = 3, 300, 24 * 3600


def start_jobs(kind: str, run_dir: Path, settings: common.Settings) -> list[Job]:
    """Start two workers by "torchrun", by two torchrun "agents", or by "plain" python."""
    if kind == "plain":
        return [common.start_plain(run_dir, settings, workers=2, restarts=RESTARTS)]
    if kind == "agents":
        return common.start_agents(run_dir, settings, agents=2, workers=1, restarts=RESTARTS)
    return [common.start(run_dir, settings, restarts=RESTARTS)]


def kill_once(
    folder: Path,
    kind: str,
    expected: str,
    length_s: float,
    rng: random.Random,
    tally: common.Tally,
    settings: common.Settings = SETTINGS,
) -> None:
    """Kill one of two workers within `length_s` s; `tally` gets whether the job has the hash `expected`."""
    victim = None
    while victim is None:  # the signal came too late, or before there was a worker: try another moment
        run_dir = folder / f"job-{rng.randrange(10**9)}"
        began, after_s = time.monotonic(), rng.uniform(0.0, length_s)
        memory = Path(f"/dev/shm/kills-{run_dir.name}")
        memory.mkdir()
        jobs = start_jobs(kind, run_dir, {**settings, "snapshot.memory_path": memory})
        time.sleep(after_s)  # until the random moment
        while settings is not SETTINGS and jobs[0].is_running() and not any(memory.glob("*/*/partial-*")):
            time.sleep(0.001)
        pids = sorted(pid for job in jobs for pid in job.workers())
        victim = common.signal_one(pids, signal.SIGKILL, rng)
        codes = common.exit_codes(jobs, TIMEOUT_S)
        memory.rmdir()  # nothing may be left there
    is_same = codes == [0] * len(jobs) and common.short_hash(run_dir) == expected
    generations = read_history(run_dir)["generations"]
    common.row(
        job=tally.trials, kind=kind, kill_after_s=round(after_s, 2), victim=victim, codes=codes,
        seconds=round(time.monotonic() - began, 1), ends=[entry["end"] for entry in generations],
        from_steps=[entry["from_step"] for entry in generations], hash=common.short_hash(run_dir),
        same=is_same,
    )  # fmt: skip
    tally.add(is_same, *jobs)


def kill_again_and_again(
    run_dir: Path, settings: common.Settings, arguments: argparse.Namespace
) -> tuple[int, int]:
    """Start a job and kill workers until it ends; return the job's exit code and the number of kills."""
    rng = random.Random(arguments.seed)
    job = common.start(run_dir, settings, restarts=100_000)
    job.wait_until(lambda: read_history(run_dir)["generations"], 600)
    next_at, signals = time.time() + rng.expovariate(1 / arguments.every_s), 0
    while job.is_running():
        time.sleep(0.05)
        pids = job.workers()
        if time.time() < next_at or not pids:
            continue
        victim = common.signal_one(pids, signal.SIGKILL, rng)
        if victim is None:
            continue  # the worker has just ended; the next turn finds another
        signals += 1
        common.row(number=signals, worker=victim, step=last_step(run_dir))
        next_at += rng.expovariate(1 / arguments.every_s)
    return job.wait(DAY_S), signals


def training_seconds(run_dir: Path) -> float:
    """Return the seconds from the start of the first generation to the last step of the last generation."""
    generations = read_history(run_dir)["generations"]
    return float(generations[-1]["seen"] - generations[0]["began"])


def storm(folder: Path, arguments: argparse.Namespace, tally: common.Tally) -> None:
    """Train the default run undisturbed, then with kills, and print rows that compare the two."""
    settings = {
        "trainer.max_steps": arguments.storm, "trainer.eval_every": 500, "trainer.device": "cpu",
        "trainer.timeout_s": 10, "snapshot.keep_last": 2,
    }  # fmt: skip
    expected, _ = common.train_undisturbed(folder, settings)
    run_dir = folder / "disturbed"
    code, signals = kill_again_and_again(run_dir, settings, arguments)
    history = read_history(run_dir)
    for generation in history["generations"]:
        common.row(**{key: generation.get(key) for key in ("workers", "from_step", "to_step", "end")})
    goodput = training_seconds(folder / "undisturbed") / training_seconds(run_dir)
    is_same = code == 0 and common.short_hash(run_dir) == expected
    common.row(
        signals=signals, seconds=round(training_seconds(run_dir), 1), goodput=round(goodput, 4),
        run_json={key: history[key] for key in ("status", "steps_lost", "seconds_lost", "goodput")},
        identical=is_same,
    )  # fmt: skip
    tally.add(is_same and goodput >= arguments.least)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--agent_jobs", type=int, default=10)
    parser.add_argument("--plain_jobs", type=int, default=20)
    parser.add_argument("--memory_jobs", type=int, default=0, help="with ddp, and as many with fsdp")
    parser.add_argument("--storm", type=int, metavar="STEPS", help="of the run that gets signals")
    parser.add_argument(
        "--every_s", type=float, default=30, help="mean of the exponential times between signals"
    )
    parser.add_argument("--least", type=float, default=0.85, help="goodput to be reached")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    counts = {"torchrun": arguments.jobs, "agents": arguments.agent_jobs, "plain": arguments.plain_jobs}
    rng, tally = random.Random(arguments.seed), common.Tally()
    with common.work_folder() as folder:
        if arguments.storm:
            storm(folder, arguments, tally)
            return tally.exit_code()
        expected, length_s = common.train_undisturbed(folder, SETTINGS)
        for kind, count in counts.items():
            for _ in range(count):
                kill_once(folder, kind, expected, length_s, rng, tally)
        if arguments.memory_jobs:
            (folder / "memory").mkdir()
            expected, length_s = common.train_undisturbed(folder / "memory", IN_MEMORY)
        for parallel in ("ddp", "fsdp"):
            settings = IN_MEMORY | {"trainer.parallel": parallel}
            for _ in range(arguments.memory_jobs):
                kill_once(folder, "torchrun", expected, length_s, rng, tally, settings)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
