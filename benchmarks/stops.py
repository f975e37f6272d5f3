"""Stop a job at a random moment: how long until it is gone, what is left, does it go on from there?

    python benchmarks/stops.py                        # 40 stops, a quarter of an hour on two cores
    python benchmarks/stops.py --plain --stops 1      # of plain `python train.py`, a minute
    python benchmarks/stops.py --pause --stops 10     # by trainer.pause_after, some minutes

The ways to stop a job take turns: SIGTERM or SIGINT to the agent, SIGUSR1 to a worker, a STOP
file. So do the moments: in the first worker's first 2 s, after an evaluation has begun, at any time. With
--pause a worker is killed at the moment, and the job stops by trainer.pause_after. After each stop the same
command is started again, until the run is finished; then a new run begins. Prints a row per stop, as JSON.

After a stop the workers must be gone within 2 s plus a step and the rest of their imports. The newest
snapshot may not be lost, and workers that had begun to train must leave a snapshot of their last step. After
the time of a pause, at most one step may begin. Each run must end with the hash and the records of an
undisturbed run. Exit code 1 if one of these conditions does not hold. Needs Linux.
"""

import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from common import SMALL, Tally, argument_parser, arguments_of, changed_program, row, short_hash, work_folder
from support.jobs import Job, is_alive, read_history

from mingpt.base import events
from mingpt.tools.jobs import torchrun

STEPS = 150
SETTINGS = SMALL | {
    "data.block_size": 64, "data.val_fraction": 0.6, "model.n_embd": 64, "trainer.batch_size": 16,
    "trainer.micro_batch_size": 2, "trainer.max_steps": STEPS, "trainer.eval_every": 40,
    "trainer.sample_tokens": 400, "snapshot.every": 10,
}  # fmt: skip
KINDS = ("SIGTERM", "SIGINT", "SIGUSR1", "STOP")
MOMENTS = ("first 2 s", "evaluation", "any")
LIMIT_S = 2.0
CODE = "import os, pathlib, stops; stops.leave_marks(pathlib.Path(os.environ['MARKS']))"


def leave_marks(marks: Path) -> None:
    """Make this worker write files to the folder `marks` at four moments.

    The moments: it listens for signals, has imported the trainer, begins an evaluation, begins a step.
    """

    def note_imports() -> None:
        while not hasattr(sys.modules.get("mingpt.training.trainer"), "Trainer"):
            time.sleep(0.01)
        (marks / f"imported-{os.getpid()}").write_text(str(time.monotonic()))

    if "RANK" in os.environ:
        threading.Thread(target=note_imports, daemon=True).start()
    events.subscribe("worker_start", lambda launch: (marks / f"listens-{os.getpid()}").touch())
    events.subscribe("evaluation_start", lambda step: (marks / "evaluating").touch())
    begun = open(marks / f"steps-{os.environ.get('RANK')}", "ab", buffering=0)  # noqa: SIM115 - until it ends
    events.subscribe("step_start", lambda step: begun.write(b"%f\n" % time.time()))


def start_marked(folder: Path, run_dir: Path, marks: Path, is_plain: bool, pause_s: float = 0) -> Job:
    """Start a job of two workers that call `leave_marks`. It pauses after `pause_s` seconds (0: never)."""
    marks.mkdir(exist_ok=True)
    launcher = [sys.executable] if is_plain else torchrun(2, restarts=3 if pause_s else 0)
    own = {"run_dir": run_dir, "trainer.workers": 2, "trainer.pause_after": pause_s or "null"}
    words = [changed_program(folder, CODE), *arguments_of(SETTINGS | own)]
    return Job([*launcher, *words], run_dir, MARKS=str(marks))


def steps_after(moment: float, marks: Path) -> int:
    """Return how many steps worker 0 has begun after a moment, in seconds since 1970."""
    return sum(float(at) > moment for at in (marks / "steps-0").read_text().split())


def newest_step(run_dir: Path) -> int:
    """Return the step of a run's newest snapshot; 0 if there is none."""
    return max((int(path.stem[5:]) for path in run_dir.glob("snapshots/step_*.json")), default=0)


def request_stop(kind: str, job: Job, pids: list[int], run_dir: Path, rng: random.Random) -> bool:
    """Request a stop, or kill a worker if `kind` is "SIGKILL"; return whether that reached a running job."""
    try:
        if kind == "STOP":
            run_dir.mkdir(exist_ok=True)
            (run_dir / "STOP").touch()
        elif kind in ("SIGUSR1", "SIGKILL"):
            os.kill(rng.choice(pids), signal.Signals[kind])
        else:
            os.kill(job.pid, signal.Signals[kind])
    except (ProcessLookupError, IndexError):
        return False
    return job.is_running()


def imports_left_s(marks: Path, since: float) -> float:
    """Return for how many seconds after `since` (time.monotonic) at least one worker was still importing."""
    ends = [float(path.read_text() or since) for path in marks.glob("imported-*")]
    return max([0.0, *(end - since for end in ends)])


def wait_for_moment(
    job: Job, moment: str, kind: str, marks: Path, length_s: float, rng: random.Random
) -> float:
    """Wait for the moment; return the seconds since the first worker's start.

    Raises RuntimeError if the job ends while this function waits for an event of the job.
    """
    job.wait_until(job.workers)
    began = time.monotonic()
    if moment == "evaluation":
        job.wait_until((marks / "evaluating").exists)
    longest_s = {"first 2 s": 2.0, "evaluation": 0.5, "any": 0.8 * length_s}[moment]
    time.sleep(rng.uniform(0.0, longest_s))  # until a random moment
    if kind == "SIGUSR1":
        job.wait_until(lambda: sum((marks / f"listens-{pid}").exists() for pid in job.workers()) == 2)
    return time.monotonic() - began


def stop_once(
    job: Job, moment: str, kind: str, run_dir: Path, marks: Path, length_s: float, rng: random.Random
) -> dict[str, Any] | None:
    """Stop a job that has just been started; return its row, or None if the request came too late."""
    try:
        after_s = wait_for_moment(job, moment, kind, marks, length_s, rng)
    except RuntimeError:
        return None  # the job has finished
    pids, before, began = job.workers(), newest_step(run_dir), time.monotonic()
    if not request_stop(kind, job, pids, run_dir, rng):
        job.wait()
        return None
    while any(is_alive(pid) for pid in pids) and time.monotonic() - began < 60:
        time.sleep(0.005)
    took = time.monotonic() - began
    code = job.wait(60 + length_s)
    agent_took = time.monotonic() - began
    history, newest, imports_s = read_history(run_dir), newest_step(run_dir), imports_left_s(marks, began)
    step_s = max((entry.get("step_s", 0.0) for entry in history["generations"]), default=0.0)
    is_good = took < LIMIT_S + step_s + imports_s and newest >= before
    is_good = is_good and not any(is_alive(pid) for pid in pids)
    if history["status"] == "stopped":  # it had begun to train: its last step must have a snapshot
        is_good = is_good and newest == history["generations"][-1]["to_step"]
    return {
        "kind": kind, "moment": moment, "after_s": round(after_s, 2), "gone_s": round(took, 2),
        "agent_gone_s": round(agent_took, 2), "imports_s": round(imports_s, 2), "status": history["status"],
        "snapshot_before": before, "snapshot": newest, "agent_code": code, "ok": is_good,
    }  # fmt: skip


def records(run_dir: Path) -> list[tuple[int, float]]:
    """Return (step, loss) of each record, in order; a step with two records is there twice."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("train/loss", line.get("val/loss"))) for line in lines]


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--stops", type=int, default=40)
    parser.add_argument("--plain", action="store_true", help="plain python in place of torchrun")
    parser.add_argument("--pause", action="store_true", help="by trainer.pause_after, with a kill before")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng, stops, runs = random.Random(arguments.seed), Tally(), Tally()
    with work_folder() as folder:
        undisturbed, began = folder / "undisturbed", time.monotonic()
        start_marked(folder, undisturbed, folder / "marks", arguments.plain).wait(600)
        length_s, expected = time.monotonic() - began, short_hash(undisturbed)
        row(undisturbed=expected, seconds=round(length_s, 1))

        def is_as_undisturbed(run_dir: Path) -> bool:
            return short_hash(run_dir) == expected and records(run_dir) == records(undisturbed)

        run_dir, started = folder / "run0", 0
        while stops.trials < arguments.stops:
            started += 1
            kind, moment = KINDS[stops.trials % len(KINDS)], MOMENTS[stops.trials % len(MOMENTS)]
            marks, pause_s = folder / f"marks{started}", 0.0
            if arguments.pause:
                kind, pause_s = "SIGKILL", rng.uniform(0.25, 0.6) * length_s
            job = start_marked(folder, run_dir, marks, arguments.plain, pause_s)
            stopped = stop_once(job, moment, kind, run_dir, marks, length_s, rng)
            if stopped and arguments.pause:
                steps = steps_after(read_history(run_dir)["job_began"] + pause_s, marks)
                is_good = stopped["ok"] and not stopped["agent_code"]
                stopped |= {"steps_after": steps, "ok": is_good and steps < 2}
            if stopped and not (arguments.pause and stopped["status"] == "finished"):
                row(**stopped)
                stops.add(stopped["ok"], job)
            if read_history(run_dir)["status"] == "finished":
                runs.add(is_as_undisturbed(run_dir))
                run_dir = folder / f"run{runs.trials}"
            (run_dir / "STOP").unlink(missing_ok=True)
        start_marked(folder, run_dir, folder / "marks", arguments.plain).wait(600)
        runs.add(is_as_undisturbed(run_dir))
    code = stops.exit_code(runs=runs.trials, identical=runs.good)
    return code if runs.good == runs.trials else 1


if __name__ == "__main__":
    sys.exit(main())
