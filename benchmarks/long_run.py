"""Long runs: does memory grow with the steps, and does a late step cost more than an early one?

    python benchmarks/long_run.py                               # 100,000 steps, half an hour on two cores
    python benchmarks/long_run.py --steps 12000 --every 1000 --pairs 1

A tiny model under torchrun, two workers. First the resident memory of every worker (VmRSS, in MB) each
`--every` steps. Then, in turns, 1,000 steps of two jobs that are resumed: one at step 1,000, one 1,000 steps
before the end; `job_s` is the whole job, `steps_s` from the first step to the end with evaluations and
snapshots, `start_s` what is before. Rows as JSON. Exit code 1 unless every worker's memory stays within 10 MB
of what it had after 2,000 steps, and the median over the pairs of late to early `steps_s` is at most 1.03.
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import row, start, wait_for_success

from mingpt.tools.jobs import ROOT, Job, last_step, read_history

EARLY, SEGMENT, BASE = 1000, 1000, 2000  # steps
LIMIT_MB, LIMIT_RATIO = 10.0, 1.03
SETTINGS = {
    "data.block_size": 8, "model.n_layer": 1, "model.n_head": 1, "model.n_embd": 8,
    "trainer.batch_size": 8, "trainer.micro_batch_size": 4, "trainer.log_every": 100,
    "trainer.eval_every": 500, "trainer.sample_tokens": 0, "trainer.device": "cpu", "snapshot.every": 500,
    "snapshot.keep_last": 10, "optimizer.warmup_steps": 10,
}  # fmt: skip


def resident_mb(pid: int) -> float:
    """VmRSS of a process; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    sizes = [line.split()[1] for line in lines if line.startswith("VmRSS:")]
    return int(sizes[0]) / 1024 if sizes else 0.0


def keep_copy(run_dir: Path, step: int, copy: Path) -> None:
    """A copy of the run folder as soon as the snapshot of this step is there."""
    if not copy.exists() and (run_dir / "snapshots" / f"step_{step:08d}.json").exists():
        shutil.copytree(run_dir, copy, ignore=shutil.ignore_patterns("*partial*"))
        for path in (copy / "snapshots").glob("step_*"):
            if int(path.name[5:13]) > step:
                path.unlink()


def watch_memory(job: Job, run_dir: Path, steps: int, every: int, work: Path) -> bool:
    """Print the workers' memory each `every` steps; whether it stays within the limit."""
    base: list[float] = []
    is_within, following = True, min(every, BASE)
    while job.is_running():
        keep_copy(run_dir, EARLY, work / "early")
        keep_copy(run_dir, steps - SEGMENT, work / "late")
        step = last_step(run_dir)
        if step < following:
            time.sleep(0.1)
            continue
        sizes = [resident_mb(pid) for pid in job.workers()]
        following = (step // every + 1) * every
        if len(sizes) != 2 or not all(sizes):
            continue  # the job is ending
        if step >= BASE and not base:
            base = sizes
        growth = [size - before for size, before in zip(sizes, base, strict=True)] if base else []
        is_within = is_within and all(abs(mb) <= LIMIT_MB for mb in growth)
        row(step=step, rss_mb=[round(mb, 1) for mb in sizes], growth_mb=[round(mb, 1) for mb in growth])
    return is_within and bool(base)


def resume(copy: Path, run_dir: Path, settings: dict[str, object], last: int) -> dict[str, float]:
    """Go on from a copy up to step `last`: the seconds of the job and of its parts."""
    shutil.copytree(copy, run_dir)
    began = time.monotonic()
    job = start(run_dir, {**settings, "trainer.max_steps": last, "snapshot.resume": "changed"})
    wait_for_success(job)
    job_s = time.monotonic() - began
    generation = read_history(run_dir)["generations"][-1]
    steps_s = generation["seen"] - generation["began"]
    shutil.rmtree(run_dir)
    return {"job_s": job_s, "steps_s": steps_s, "start_s": job_s - steps_s}


def compare(work: Path, settings: dict[str, object], steps: int, pairs: int) -> dict[str, float]:
    """Median over the pairs of late to early, for each time."""
    ratios: dict[str, list[float]] = {}
    for number in range(pairs):
        ends = {"early": EARLY + SEGMENT, "late": steps}
        order = list(ends) if number % 2 == 0 else list(reversed(ends))
        times = {name: resume(work / name, work / f"{name}-{number}", settings, ends[name]) for name in order}
        for name in times["early"]:
            ratios.setdefault(name, []).append(times["late"][name] / times["early"][name])
        rounded = {name: {key: round(s, 2) for key, s in found.items()} for name, found in times.items()}
        row(pair=number, first=order[0], **rounded)
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        text = work / "text.txt"
        text.write_bytes((ROOT / "data" / "input.txt").read_bytes()[:20_000])
        settings = {**SETTINGS, "data.path": text, "snapshot.memory_path": work}
        run_dir = work / "run"
        job = start(run_dir, {**settings, "trainer.max_steps": arguments.steps})
        is_within = watch_memory(job, run_dir, arguments.steps, arguments.every, work)
        wait_for_success(job)
        ratios = compare(work, settings, arguments.steps, arguments.pairs)
    is_as_fast = ratios["steps_s"] <= LIMIT_RATIO
    row(
        steps=arguments.steps,
        within_10_mb=is_within,
        median_late_to_early=ratios,
        all=is_within and is_as_fast,
    )
    return 0 if is_within and is_as_fast else 1


if __name__ == "__main__":
    sys.exit(main())
