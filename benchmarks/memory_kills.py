"""Workers killed in the middle of a save to memory: does the job go on, with the bits of an undisturbed run?

    python benchmarks/memory_kills.py              # 20 jobs with ddp, 20 with fsdp; a quarter of an hour
    python benchmarks/memory_kills.py --jobs 1

Each job has two workers under torchrun and saves to memory alone before its end. Once it has made a random
number of steps, one worker, drawn at random, gets SIGKILL while a save is marked as unfinished there. Prints
a row per job, as JSON; exit code 1 unless each job ends with the hash of an undisturbed run, goes on from a
snapshot in memory, and leaves nothing there. Needs Linux.
"""

import random
import signal
import sys
import time
from pathlib import Path

import common
from support.jobs import last_step, read_history

SETTINGS = common.SMALL | {
    "trainer.max_steps": 60, "snapshot.every": 1000, "snapshot.memory_every": 2, "model.n_embd": 256,
}  # fmt: skip
TIMEOUT_S = 300.0


def kill_in_a_save(
    folder: Path, settings: common.Settings, expected: str, rng: random.Random, tally: common.Tally
) -> None:
    run_dir, memory = folder / f"job-{tally.trials}", Path(f"/dev/shm/memory-kills-{rng.randrange(10**9)}")
    memory.mkdir()
    job = common.start(run_dir, settings | {"snapshot.memory_path": memory}, restarts=1)
    least, deadline = rng.randrange(6, 40), time.monotonic() + TIMEOUT_S
    while not (run_dir / "metrics.jsonl").exists() or last_step(run_dir) < least:
        assert time.monotonic() < deadline and job.is_running(), job.err()
        time.sleep(0.02)
    pids = sorted(job.workers())
    while not any(memory.glob("*/*/partial-step_*")):
        assert time.monotonic() < deadline and job.is_running(), job.err()
    time.sleep(rng.uniform(0.0, 0.02))
    victim = common.signal_one(pids, signal.SIGKILL, rng)
    codes = common.exit_codes([job], TIMEOUT_S)
    generations = read_history(run_dir)["generations"]
    from_steps = [entry["from_step"] for entry in generations]
    left = [path.name for path in memory.iterdir()]
    is_same = common.short_hash(run_dir) == expected
    is_ok = codes == [0] and is_same and len(from_steps) == 2 and from_steps[-1] > 0 and not left
    parallel = settings["trainer.parallel"]
    common.row(parallel=parallel, victim=victim, codes=codes, from_steps=from_steps, same=is_same, left=left)
    tally.add(is_ok, job)
    memory.rmdir()


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--jobs", type=int, default=20, help="per strategy")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, tally = random.Random(arguments.seed), common.Tally()
    with common.work_folder() as folder:
        expected, _ = common.train_undisturbed(folder, SETTINGS)
        for parallel in ("ddp", "fsdp"):
            for _ in range(arguments.jobs):
                settings = SETTINGS | {"trainer.parallel": parallel}
                kill_in_a_save(folder, settings, expected, rng, tally)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
