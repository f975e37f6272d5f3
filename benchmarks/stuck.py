"""A worker whose main thread is stuck in C code, and its sibling is killed: is it gone in 1.5 s?

    python benchmarks/stuck.py             # 20 times
    python benchmarks/stuck.py --busy 2    # beside so many processes that do nothing but compute

As a main thread waits in a CUDA call: pause(), sleep() or a read() of an empty pipe, with the GIL released,
at the start of a random step or after a backward pass. Another worker of two or three then gets SIGKILL. A
row per try, as JSON: the seconds from the signal until the stuck worker was gone. Exit code 1 unless that
was at most 1.5 s each time, the next generation finished the run with the bits of an undisturbed one, and
run.json names the worker that was killed and no other.
"""

import argparse
import ctypes
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import arguments_of, row, short_hash, start, wait_for_success

from mingpt.base import events
from mingpt.tools.jobs import ROOT, Job, is_alive, read_history, torchrun

STEPS, LIMIT_S = 60, 1.5
SETTINGS = {
    "data.block_size": 64, "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 64,
    "trainer.batch_size": 16, "trainer.micro_batch_size": 2, "trainer.max_steps": STEPS,
    "trainer.eval_every": 30, "trainer.sample_tokens": 0, "trainer.device": "cpu",
    "trainer.timeout_s": 300, "snapshot.every": 10,
}  # fmt: skip


def wait_in_c(call: str) -> None:
    """Never returns."""
    libc = ctypes.CDLL(None)
    while True:
        if call == "pause":
            libc.pause()
        elif call == "sleep":
            libc.sleep(1000)
        else:
            os.read(os.pipe()[0], 1)


def run_worker(mark: Path, rank: int, step: int, event: str, call: str, argv: list[str]) -> None:
    """train.py, in which one worker gets stuck, once."""

    def stick(**details: Any) -> None:
        if details["step"] == step and int(os.environ["RANK"]) == rank and not mark.exists():
            mark.write_text(str(os.getpid()))
            wait_in_c(call)

    events.subscribe(event, stick)
    sys.argv = ["train.py", *argv]
    sys.path.insert(0, str(ROOT))
    import train

    train.main()


def gone_after_s(job: Job, mark: Path, rng: random.Random) -> tuple[float, int]:
    """Kill a worker that is not stuck: seconds until the stuck one is gone, and which one was killed."""
    job.wait_until(lambda: mark.exists() and mark.read_text())
    pids, stuck = job.workers(), int(mark.read_text())
    time.sleep(rng.uniform(0.0, 0.5))  # the random moment itself
    victim = rng.choice([pid for pid in pids if pid != stuck])
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while is_alive(stuck) and time.monotonic() - began < 60:
        time.sleep(0.002)
    return time.monotonic() - began, pids.index(victim)


def try_once(folder: Path, number: int, expected: str, rng: random.Random) -> bool:
    run_dir, mark = folder / f"run{number}", folder / f"stuck{number}"
    workers, step = rng.choice([2, 3]), rng.randrange(1, STEPS)
    rank, event = rng.randrange(workers), rng.choice(["step_start", "backward_end"])
    call = rng.choice(["pause", "sleep", "read"])
    program = [__file__, "--worker", str(mark), str(rank), str(step), event, call]
    words = [*program, "train.py", f"run_dir={run_dir}", *arguments_of(SETTINGS)]
    job = Job([*torchrun(workers, restarts=2), *words], run_dir)
    gone_s, victim = gone_after_s(job, mark, rng)
    code, ends = job.wait(300), [entry["end"] for entry in read_history(run_dir)["generations"]]
    is_good = gone_s <= LIMIT_S and code == 0 and short_hash(run_dir) == expected
    is_good = is_good and ends == [f"worker {victim} vanished", "finished"]
    plan = {"workers": workers, "stuck": rank, "killed": victim, "step": step, "event": event, "call": call}
    row(number=number, **plan, gone_s=round(gone_s, 2), ends=ends, ok=is_good)
    if not is_good:
        print(job.err()[-3000:], file=sys.stderr)
    return is_good


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--busy", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, good = random.Random(arguments.seed), 0
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(arguments.busy)]
    try:
        with tempfile.TemporaryDirectory() as name:
            undisturbed = Path(name) / "undisturbed"
            wait_for_success(start(undisturbed, SETTINGS))
            for number in range(arguments.times):
                good += try_once(Path(name), number, short_hash(undisturbed), rng)
    finally:
        for other in others:
            other.kill()
            other.wait()
    row(times=arguments.times, busy=arguments.busy, ok=good)
    return 0 if good == arguments.times else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        path, rank_text, step_text, event_name, c_call = sys.argv[2:7]
        run_worker(Path(path), int(rank_text), int(step_text), event_name, c_call, sys.argv[8:])
    else:
        sys.exit(main())
