"""Workers that freeze or are stuck: when is it noticed, when does the job go on, with which bits?

    python benchmarks/freeze.py                         # 10 frozen, 10 before, 20 stuck: 20 minutes
    python benchmarks/freeze.py --frozen 1 --before 0 --stuck 0 --minutes 0       # only one: half a minute

- frozen: a worker gets SIGSTOP at a random moment. `noticed_s` is when another worker is gone, at most 12.
  `on_s` is when the next generation has completed a step, at most 45.
- before: a worker gets SIGSTOP before the rendezvous. The other workers wait for `patience_s`, and name the
  frozen worker. `gone_s` is when the frozen worker is gone, at most `patience_s` + 8.
- stuck: a worker's main thread waits in C code, as in a CUDA call. Another worker gets SIGKILL. `gone_s` is
  when the stuck worker is gone, at most 1.5. run.json names only the killed worker.
- busy: a run of `--minutes` beside four processes that keep the cores busy has a single generation.

Times are in seconds since the signal. Prints a row per trial, as JSON. Exit code 1 unless all of this
holds, and frozen, before and stuck jobs end with the bits of an undisturbed run. Needs Linux.
"""

import ctypes
import os
import random
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import common
from support.jobs import Job, is_alive, last_step, read_history

from mingpt.base import events
from mingpt.tools.jobs import torchrun

STEPS, TIMEOUT_S, START_S, STUCK_S, BUSY = 150, 10, 8.0, 1.5, 4
SETTINGS = common.SMALL | {
    "data.block_size": 64, "model.n_embd": 64, "trainer.batch_size": 16, "trainer.micro_batch_size": 2,
    "trainer.max_steps": STEPS, "trainer.eval_every": 50, "trainer.timeout_s": TIMEOUT_S,
    "snapshot.every": 10,
}  # fmt: skip


def freeze(job: Job, rng: random.Random) -> tuple[int, list[int]]:
    """Send SIGSTOP to a random worker; return its index and the process ids of all workers."""
    pids = job.workers()
    victim = rng.randrange(len(pids))
    os.kill(pids[victim], signal.SIGSTOP)
    return victim, pids


def freeze_in_training(
    folder: Path, number: int, expected: str, rng: random.Random, tally: common.Tally
) -> None:
    run_dir, workers = folder / f"frozen{number}", 2 + number % 2
    job = common.start(run_dir, SETTINGS, workers=workers, restarts=3)
    step = rng.randrange(2, STEPS - 20)
    job.wait_until(lambda: last_step(run_dir) >= step, 300)
    time.sleep(rng.uniform(0, 0.3))  # a random moment in a step
    began = time.monotonic()
    victim, pids = freeze(job, rng)
    others = [pid for pid in pids if pid != pids[victim]]

    def goes_on() -> bool:
        generations = read_history(run_dir)["generations"]
        return len(generations) > 1 and last_step(run_dir) > generations[-1]["from_step"]

    job.wait_until(lambda: not all(map(is_alive, others)), TIMEOUT_S + 60)
    noticed_s = time.monotonic() - began
    job.wait_until(goes_on, TIMEOUT_S + 60)
    on_s = time.monotonic() - began
    codes, ends = (
        common.exit_codes([job], 300),
        [entry["end"] for entry in read_history(run_dir)["generations"]],
    )
    is_good = noticed_s <= TIMEOUT_S + 2 and on_s <= TIMEOUT_S + 35
    is_good = is_good and codes == [0] and common.short_hash(run_dir) == expected
    times = {"noticed_s": round(noticed_s, 2), "on_s": round(on_s, 2)}
    common.row(frozen=number, workers=workers, victim=victim, at_step=step, **times, ends=ends, ok=is_good)
    tally.add(is_good, job)


def freeze_before_meeting(
    folder: Path, number: int, expected: str, rng: random.Random, tally: common.Tally
) -> None:
    """Freeze a worker before the workers meet; a trial in which they had met does not count."""
    run_dir, workers = folder / f"before{number}", 2 + number % 2
    job = common.start(run_dir, SETTINGS, workers=workers, restarts=1)
    job.wait_until(lambda: len(job.workers()) == workers)
    time.sleep(rng.uniform(0, 1.5))  # until a random moment
    began = time.monotonic()
    victim, pids = freeze(job, rng)
    time.sleep(0.5)  # time for the workers to meet and open log.txt, if they do
    if (run_dir / "log.txt").exists():
        job.kill()
        return
    job.wait_until(lambda: not is_alive(pids[victim]), 120)
    gone_s = time.monotonic() - began
    codes = common.exit_codes([job], 300)
    named = re.search(r"worker (\d) did not reach the rendezvous within ([\d.]+) s", job.err())
    patience_s = float(named[2]) if named else 0.0
    is_good = named is not None and int(named[1]) == victim
    is_good = is_good and gone_s <= patience_s + START_S and patience_s <= max(TIMEOUT_S, 3 * START_S)
    is_good = is_good and codes == [0] and common.short_hash(run_dir) == expected
    times = {"gone_s": round(gone_s, 2), "patience_s": patience_s}
    common.row(before=number, workers=workers, victim=victim, **times, ok=is_good)
    tally.add(is_good, job)


def stick_once(mark: Path, rank: int, step: int, event: str, call: str) -> None:
    """At an event of a step, let a rank create `mark` and hang in C function `call`, unless `mark` exists."""
    libc = ctypes.CDLL(None)

    def stick(**details: Any) -> None:
        if details["step"] != step or int(os.environ["RANK"]) != rank or mark.exists():
            return
        mark.write_text(str(os.getpid()))
        while True:
            if call == "pause":
                libc.pause()
            elif call == "sleep":
                libc.sleep(1000)
            else:
                os.read(os.pipe()[0], 1)

    events.subscribe(event, stick)


def kill_beside_stuck(
    folder: Path, number: int, expected: str, rng: random.Random, tally: common.Tally
) -> None:
    """Kill a worker that is not stuck, and measure how long the stuck worker lives."""
    run_dir, mark = folder / f"run{number}", folder / f"stuck{number}"
    workers, step = rng.choice([2, 3]), rng.randrange(1, STEPS)
    rank, event = rng.randrange(workers), rng.choice(["step_start", "backward_end"])
    call = rng.choice(["pause", "sleep", "read"])
    settings = SETTINGS | {"run_dir": run_dir, "trainer.timeout_s": 300}
    code = f"import freeze, pathlib; mark = pathlib.Path({str(mark)!r})\n"
    code += f"freeze.stick_once(mark, {rank}, {step}, {event!r}, {call!r})"
    program = common.changed_program(folder, code)
    command = [*torchrun(workers, restarts=2), program, *common.arguments_of(settings)]
    job = Job(command, run_dir)
    job.wait_until(lambda: mark.exists() and mark.read_text())
    pids, stuck = job.workers(), int(mark.read_text())
    time.sleep(rng.uniform(0.0, 0.5))  # until a random moment
    victim = rng.choice([pid for pid in pids if pid != stuck])
    began = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    while is_alive(stuck) and time.monotonic() - began < 60:
        time.sleep(0.002)
    gone_s = time.monotonic() - began
    codes, ends = (
        common.exit_codes([job], 300),
        [entry["end"] for entry in read_history(run_dir)["generations"]],
    )
    is_good = gone_s <= STUCK_S and codes == [0] and common.short_hash(run_dir) == expected
    is_good = is_good and ends == [f"worker {pids.index(victim)} vanished", "finished"]
    plan = {"workers": workers, "stuck": rank, "killed": pids.index(victim)}
    common.row(number=number, **plan, step=step, event=event, call=call, gone_s=round(gone_s, 2), ok=is_good)
    tally.add(is_good, job)


def train_beside_busy_processes(folder: Path, minutes: float, tally: common.Tally) -> None:
    """Train with many evaluations and snapshots; no worker may be taken for frozen."""
    run_dir, settings = folder / "busy", SETTINGS | {"trainer.max_steps": 10**6}
    with common.busy_processes(BUSY):
        job = common.start(run_dir, settings, restarts=3)
        job.wait_until(lambda: last_step(run_dir) >= 1, 300)
        began = time.monotonic()
        while job.is_running() and time.monotonic() - began < 60 * minutes:
            time.sleep(0.5)
        was_running = job.is_running()
        (run_dir / "STOP").touch()
        codes = common.exit_codes([job], 300)
    generations = read_history(run_dir)["generations"]
    is_good = was_running and codes == [0] and len(generations) == 1
    common.row(busy=BUSY, minutes=minutes, steps=generations[-1]["to_step"], ok=is_good)
    tally.add(is_good, job)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("--frozen", type=int, default=10)
    parser.add_argument("--before", type=int, default=10)
    parser.add_argument("--stuck", type=int, default=20)
    parser.add_argument("--minutes", type=float, default=5, help="of the run for false alarms; 0 for none")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, tally, tries = random.Random(arguments.seed), common.Tally(), 0
    with common.work_folder() as folder:
        expected, _ = common.train_undisturbed(folder, SETTINGS)
        for number in range(arguments.frozen):
            freeze_in_training(folder, number, expected, rng, tally)
        while tally.trials < arguments.frozen + arguments.before:
            tries += 1
            freeze_before_meeting(folder, tries, expected, rng, tally)
        for number in range(arguments.stuck):
            kill_beside_stuck(folder, number, expected, rng, tally)
        if arguments.minutes:
            train_beside_busy_processes(folder, arguments.minutes, tally)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
