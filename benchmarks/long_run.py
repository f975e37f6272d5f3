"""Long runs: does memory grow with the steps, and does a late step cost more than an early one?

    python benchmarks/long_run.py                               # 100,000 steps, half an hour on two cores
    python benchmarks/long_run.py --steps 4000 --every 1000 --pairs 1      # two minutes

Trains a tiny model with two workers, and measures every worker's resident memory, in MiB. Then
alternately resumes two copies of the run, one from step 1,000 and one from 1,000 steps before the end, and
measures how long the next 1,000 steps take. Prints rows as JSON. The exit code is 1 if a worker's memory
changes by more than 10 MiB after step 2,000, or if the median ratio of late times to early times is above
1.03. Needs Linux, and cores that nobody else uses.
"""

import shutil
import sys
import time
from pathlib import Path

import common
from support.jobs import Job, last_step, read_history

from mingpt.tools.jobs import ROOT

EARLY, SEGMENT, BASE = 1000, 1000, 2000  # steps
LIMIT_MB, LIMIT_RATIO = 10.0, 1.03
SETTINGS = common.SMALL | {
    "data.block_size": 8, "model.n_layer": 1, "model.n_head": 1, "model.n_embd": 8,
    "trainer.micro_batch_size": 4, "trainer.log_every": 100, "trainer.eval_every": 500,
    "snapshot.every": 500, "snapshot.keep_last": 10, "optimizer.warmup_steps": 10,
}  # fmt: skip


def keep_copy(run_dir: Path, step: int, copy: Path) -> None:
    """Copy the run folder, without later snapshots, if this step's snapshot exists and `copy` does not."""
    if not copy.exists() and (run_dir / "snapshots" / f"step_{step:08d}.json").exists():
        shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("*partial*"))
        for path in (copy / "snapshots").glob("step_*"):
            if int(path.name[5:13]) > step:
                path.unlink()


def watch_memory(job: Job, run_dir: Path, steps: int, every: int, work: Path) -> bool:
    """Print the workers' memory about every `every` steps, and copy the run twice to `work` (`keep_copy`).

    Returns whether memory changes by at most LIMIT_MB from step BASE on.
    """
    base: list[float] = []
    is_within, following = True, min(every, BASE)
    while job.is_running():
        keep_copy(run_dir, EARLY, work / "early")
        keep_copy(run_dir, steps - SEGMENT, work / "late")
        step = last_step(run_dir)
        if step < following:
            time.sleep(0.1)
            continue
        sizes = [common.process_mb(pid, "VmRSS") for pid in job.workers()]
        following = (step // every + 1) * every
        if len(sizes) != 2 or not all(sizes):
            continue  # the job is ending
        if step >= BASE and not base:
            base = sizes
        growth = [size - before for size, before in zip(sizes, base, strict=True)] if base else []
        is_within = is_within and all(abs(mb) <= LIMIT_MB for mb in growth)
        common.row(
            step=step, rss_mb=[round(mb, 1) for mb in sizes], growth_mb=[round(mb, 1) for mb in growth]
        )
    return is_within and bool(base)


def resume(copy: Path, settings: common.Settings, last: int) -> float:
    """Resume the run in `copy` up to step `last`; return the seconds from the start to the last step."""
    run_dir = copy.with_name(f"{copy.name}-again")
    shutil.copytree(copy, run_dir)
    common.train(run_dir, {**settings, "trainer.max_steps": last, "snapshot.resume": "changed"})
    generation = read_history(run_dir)["generations"][-1]
    shutil.rmtree(run_dir)
    return float(generation["seen"] - generation["began"])


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    steps = arguments.steps
    with common.work_folder() as work:
        text = work / "text.txt"
        text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
        settings = {**SETTINGS, "data.path": text, "snapshot.memory_path": work}
        run_dir = work / "run"
        job = common.start(run_dir, {**settings, "trainer.max_steps": steps})
        is_within = watch_memory(job, run_dir, steps, arguments.every, work)
        common.wait_for_success(job)
        variants = {
            "early_s": lambda: resume(work / "early", settings, EARLY + SEGMENT),
            "late_s": lambda: resume(work / "late", settings, steps),
        }
        found = common.measure_in_turns(variants, arguments.pairs, digits=2)
    ratio = common.median_and_spread(common.paired(found, "late_s", "early_s"))
    common.row(steps=steps, within_10_mb=is_within, **ratio)
    return 0 if is_within and ratio["ratio"] <= LIMIT_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
