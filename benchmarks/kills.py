"""Kill a worker at a random moment: does the job finish by itself, with the bits of an undisturbed run?

    python benchmarks/kills.py
    python benchmarks/kills.py --jobs 3 --agent_jobs 0 --plain_jobs 0 --seed 7

20 jobs of two workers under torchrun, 10 of two agents with one worker each, 20 of two workers under plain
`python train.py`; all may restart three times. One of the workers gets SIGKILL at a seeded
random moment between its start and the time that an undisturbed job takes. A job counts only if the signal
hit a living worker. One row per job, as JSON; exit code 1 unless every job finished with the hash of the
undisturbed one.
"""

import argparse
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from common import exit_codes, row, short_hash, signal_one, start, start_agents, start_plain

from mingpt.tools.jobs import Job, read_history

SETTINGS = {
    "data.block_size": 32, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 32, "trainer.batch_size": 8,
    "trainer.micro_batch_size": 1, "trainer.max_steps": 400, "trainer.eval_every": 100,
    "trainer.log_every": 10, "trainer.sample_tokens": 0, "trainer.timeout_s": 60, "trainer.device": "cpu",
    "snapshot.every": 20,
}  # fmt: skip
RESTARTS, TIMEOUT_S = 3, 300


def train_undisturbed(folder: Path) -> tuple[str, float]:
    """Hash and seconds of a job without a kill."""
    run_dir, began = folder / "undisturbed", time.monotonic()
    codes = exit_codes([start(run_dir, SETTINGS, restarts=RESTARTS)], TIMEOUT_S)
    seconds = time.monotonic() - began
    row(job="undisturbed", codes=codes, seconds=round(seconds, 1), hash=short_hash(run_dir))
    return short_hash(run_dir), seconds


def start_jobs(kind: str, run_dir: Path) -> list[Job]:
    """Two workers by "torchrun", by two torchrun "agents", or by "plain" python."""
    if kind == "plain":
        return [start_plain(run_dir, SETTINGS, workers=2, restarts=RESTARTS)]
    if kind == "agents":
        return start_agents(run_dir, SETTINGS, agents=2, workers=1, restarts=RESTARTS)
    return [start(run_dir, SETTINGS, restarts=RESTARTS)]


def is_finished_after_kill(
    folder: Path, number: int, kind: str, expected: str, length_s: float, rng: random.Random
) -> bool:
    """Run a job of two workers and kill one of them; whether it ends with the expected hash."""
    victim = None
    while victim is None:  # the signal came too late, or before there was a worker: another moment
        run_dir = folder / f"job{number}-{rng.randrange(10**9)}"
        began, after_s = time.monotonic(), rng.uniform(0.0, length_s)
        jobs = start_jobs(kind, run_dir)
        time.sleep(after_s)  # the random moment itself
        pids = sorted(pid for job in jobs for pid in job.workers())
        victim = signal_one(pids, signal.SIGKILL, rng)
        codes = exit_codes(jobs, TIMEOUT_S)
    is_same = codes == [0] * len(jobs) and short_hash(run_dir) == expected
    generations = read_history(run_dir)["generations"]
    row(
        job=number,
        kind=kind,
        kill_after_s=round(after_s, 2),
        victim=victim,
        codes=codes,
        seconds=round(time.monotonic() - began, 1),
        ends=[entry["end"] for entry in generations],
        from_steps=[entry["from_step"] for entry in generations],
        hash=short_hash(run_dir),
        same=is_same,
    )
    if not is_same:
        for job in jobs:
            print(job.err()[-3000:], file=sys.stderr)
    return is_same


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--agent_jobs", type=int, default=10)
    parser.add_argument("--plain_jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    kinds = (
        ["torchrun"] * arguments.jobs + ["agents"] * arguments.agent_jobs + ["plain"] * arguments.plain_jobs
    )
    rng, good, wanted = random.Random(arguments.seed), 0, len(kinds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        expected, length_s = train_undisturbed(folder)
        for number, kind in enumerate(kinds):
            good += is_finished_after_kill(folder, number, kind, expected, length_s, rng)
    row(identical=good, of=wanted)
    return 0 if good == wanted else 1


if __name__ == "__main__":
    sys.exit(main())
