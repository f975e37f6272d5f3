"""Faults at random moments: does each run end with the bits and records of an undisturbed run?

    python benchmarks/faults.py                               # 5 trials of each fault, an hour on two cores
    python benchmarks/faults.py kill stop --trials 1          # of these two, a minute
    python benchmarks/faults.py kill_memory --trials 20 --settings data.val_fraction=0.01   # five minutes
    python benchmarks/faults.py --storm 5000 --every_s 30     # twice 10 minutes

- kill, kill_agents, kill_plain: one of two workers under torchrun, under two agents of torchrun or under
  plain python gets SIGKILL.
- kill_memory: under plain python, the worker that writes a snapshot to memory, or another worker, gets
  SIGKILL when half of a tensor file is written, in turn for each strategy and number of workers. Nothing
  else is saved before the end. The job goes on from the last whole snapshot in memory, `held`, or from the
  one that was being written, `saving`. `held` is at most snapshot.memory_every steps older than `saving`.
- frozen: a worker gets SIGSTOP. `noticed_s` is when another worker is gone, at most 12. `on_s` is when the
  next generation has completed a step, at most 45.
- before: a worker gets SIGSTOP before the rendezvous. The others wait for `patience_s` and name the frozen
  worker. `gone_s` is when the frozen worker is gone, at most `patience_s` + 8.
- stuck: a worker waits in C code, as in a CUDA call, and another gets SIGKILL. `gone_s` is when the stuck
  worker is gone, at most 1.5. run.json names only the killed worker.
- busy: four processes keep the cores busy; the run has one generation.
- stop, stop_plain: SIGTERM, SIGINT, SIGUSR1 or a STOP file. `gone_s` is when the workers are gone, at most 2
  plus a step, and during a start plus the time to import torch. A run that trained has a snapshot of its
  last step. The same command finishes the run.
- pause: a kill, then trainer.pause_after. The run pauses at most 2 s plus a step after that time.
- disk: run_dir, snapshot.path or the cache of a downloaded text is full. The job goes on, or ends with one
  sentence. The same command finishes the run when there is room. Needs root.

Times are in seconds since the fault. Prints a row per trial, as JSON. Exit code 1 unless all of this holds
and every run is complete. Only records that run.json calls missing may be missing.

With --storm STEPS, a worker of the default run gets SIGKILL every --every_s seconds on average. `goodput`,
the time of an undisturbed run over the time of this run, must be at least --least. Needs Linux.
"""

import argparse
import contextlib
import ctypes
import functools
import http.server
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import common
from support.jobs import Job, children, free_port, is_alive, last_step, read_history, read_metric

from mingpt.base import events
from mingpt.tools.jobs import ROOT, torchrun

STEPS, TIMEOUT_S, LIMIT_S, START_S, STUCK_S, JOB_S = 150, 10, 2.0, 8.0, 1.5, 300
SETTINGS = common.SMALL | {
    "data.block_size": 64, "data.val_fraction": 0.2, "model.n_embd": 64, "trainer.batch_size": 16,
    "trainer.micro_batch_size": 2, "trainer.max_steps": STEPS, "trainer.eval_every": 40,
    "trainer.sample_tokens": 200, "snapshot.every": 10,
}  # fmt: skip
IMPATIENT = {"trainer.timeout_s": TIMEOUT_S}
OWN_TRACEBACK = re.compile(r'^  File ".*/(?:mingpt/\S+|train)\.py"', re.MULTILINE)
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {}, "fsdp": {"trainer.parallel": "fsdp"}, "sharded": {"trainer.shard_optimizer": True}
}  # fmt: skip
# (strategy, workers, whether the worker that writes is killed, not another one)
MEMORY_CASES = list(itertools.product(STRATEGIES, (2, 3), (True, False)))
MEMORY_EVERY = 5
Facts = dict[str, Any]  # what a trial's row tells; "ok" is whether what the fault itself asks for holds


@dataclass
class Trial:
    """A run that gets a fault; `stack` is closed when the run has been judged."""

    folder: Path
    rng: random.Random
    length_s: float  # of an undisturbed run
    import_s: float  # the time of a bare `import torch`
    number: int = 0  # of the trial, for faults that try several cases in turn
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    settings: dict[str, Any] = field(default_factory=dict)  # in addition to SETTINGS
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run_dir = self.folder / "run"

    def start(
        self, launch: str = "torchrun", workers: int = 2, restarts: int = 3, program: str = "train.py"
    ) -> Job:
        """Start a job by "torchrun", "plain" python or two "agents" of torchrun; return it, or the first."""
        settings, output = SETTINGS | self.settings, self.folder / "job"
        if launch == "plain":
            named: dict[str, Any] = {"output": output, "program": program}
            self.jobs = [common.start_plain(self.run_dir, settings, workers, restarts, **named)]
        elif launch == "agents":
            rendezvous = ["--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}", "--rdzv_id=job"]
            command = [*torchrun(1, restarts, ["--nnodes=2", *rendezvous]), "train.py"]
            command += common.arguments_of({**settings, "run_dir": self.run_dir})
            self.jobs = [Job(command, self.folder / f"job{agent}") for agent in range(2)]
        else:
            options: dict[str, Any] = {"workers": workers, "restarts": restarts, "program": program}
            self.jobs = [common.start(self.run_dir, settings, output=output, **options)]
        return self.jobs[0]

    def end(self) -> list[int | None]:
        """Wait for the jobs; return their exit codes, None for a job that had to be killed."""
        return common.exit_codes(self.jobs, JOB_S)

    def workers(self) -> list[int]:
        return sorted(pid for job in self.jobs for pid in job.workers())

    def generations(self) -> list[dict[str, Any]]:
        return list(read_history(self.run_dir)["generations"])

    def losses(self) -> dict[tuple[str, int], float]:
        """Return the losses on record, by name and step."""
        names = ("train/loss", "val/loss")
        return {(name, at): loss for name in names for at, loss in read_metric(self.run_dir, name).items()}

    def newest_step(self) -> int:
        """Return the step of the newest snapshot; 0 if there is none."""
        return max((int(path.stem[5:]) for path in self.run_dir.glob("snapshots/step_*.json")), default=0)

    def wait_for_step(self, job: Job) -> int:
        """Wait for a random step, then for a random moment in a step; return the step."""
        step = self.rng.randrange(2, STEPS - 20)
        job.wait_until(lambda: last_step(self.run_dir) >= step, JOB_S)
        time.sleep(self.rng.uniform(0, 0.3))
        return step

    def freeze(self, job: Job) -> tuple[int, list[int]]:
        """Send SIGSTOP to a random worker; return its index and the process ids of all workers."""
        pids = job.workers()
        victim = self.rng.randrange(len(pids))
        os.kill(pids[victim], signal.SIGSTOP)
        return victim, pids


def seconds_until_gone(pids: list[int]) -> float:
    """Wait until none of these processes lives, at most 60 s; return the seconds."""
    began = time.monotonic()
    while any(map(is_alive, pids)) and time.monotonic() - began < 60:
        time.sleep(0.002)
    return round(time.monotonic() - began, 2)


def kill(trial: Trial, launch: str) -> Facts | None:
    trial.start(launch)
    after_s = trial.rng.uniform(0, trial.length_s)
    time.sleep(after_s)  # until the random moment
    victim = common.signal_one(trial.workers(), signal.SIGKILL, trial.rng)
    codes = trial.end()
    if victim is None:
        return None  # the signal came too late, or before there was a worker
    return {"after_s": round(after_s, 2), "victim": victim, "codes": codes, "ok": not any(codes)}


def kill_in_save(mark: Path, memory: Path, number: int, is_writer: bool) -> None:
    """Kill a worker in the save number `number` to a folder in `memory`, unless `mark` exists.

    The worker that writes is killed or, without `is_writer`, another one. `mark` gets the step that is being
    saved, and that of the last whole snapshot (0: none). Call this in each worker.
    """
    saved, writing = [0], [Path()]  # steps whose save has begun, and the path of the present file

    def on_write(name: str, path: str, size: int) -> None:
        writing[0] = Path(path)
        step = int(name.split("_")[-1].partition(".")[0]) if "step_" in name else saved[-1]
        if memory in writing[0].parents and step > saved[-1]:
            saved.append(step)

    def on_progress(name: str, written: int, size: int) -> None:
        is_time = len(saved) == number + 1 and name.endswith(".safetensors") and 2 * written >= size
        if not is_time or memory not in writing[0].parents or mark.exists():
            return
        mark.write_text(json.dumps({"saving": saved[-1], "held": saved[-2]}))
        victims = [pid for pid in children(os.getppid()) if (pid == os.getpid()) == is_writer]
        os.kill(victims[-1], signal.SIGKILL)

    events.subscribe("file_write", on_write)
    events.subscribe("file_progress", on_progress)


def kill_memory(trial: Trial) -> Facts:
    strategy, workers, is_writer = MEMORY_CASES[trial.number % len(MEMORY_CASES)]
    memory, mark = Path(f"/dev/shm/faults-{os.getpid()}-{trial.folder.name}"), trial.folder / "mark"
    memory.mkdir()
    trial.settings = STRATEGIES[strategy] | {
        "snapshot.memory_path": memory, "snapshot.memory_every": MEMORY_EVERY, "snapshot.every": 1000,
    }  # fmt: skip
    number = trial.rng.randrange(1, STEPS // MEMORY_EVERY)
    place = f"pathlib.Path({str(mark)!r}), pathlib.Path({str(memory)!r}), {number}, {is_writer}"
    code = f"import faults, pathlib; faults.kill_in_save({place})"
    trial.start("plain", workers, program=common.changed_program(trial.folder, code))
    codes, told, ends = trial.end(), json.loads(mark.read_text()), trial.generations()
    memory.rmdir()  # nothing may be left there
    from_step = ends[-1]["from_step"]
    is_good = codes == [0] and len(ends) == 2 and told["saving"] - told["held"] <= MEMORY_EVERY
    is_good = is_good and told["held"] <= from_step <= (told["held"] if is_writer else told["saving"])
    facts = {"strategy": strategy, "workers": workers, "is_writer": is_writer, **told}
    return facts | {"from_step": from_step, "lost": ends[0]["to_step"] - from_step, "ok": is_good}


def frozen(trial: Trial) -> Facts:
    trial.settings, workers = IMPATIENT, trial.rng.choice([2, 3])
    job = trial.start(workers=workers)
    step, (victim, pids) = trial.wait_for_step(job), trial.freeze(job)
    began = time.monotonic()

    def goes_on() -> bool:
        generations = trial.generations()
        return len(generations) > 1 and last_step(trial.run_dir) > generations[-1]["from_step"]

    others = [pid for pid in pids if pid != pids[victim]]
    job.wait_until(lambda: not all(map(is_alive, others)), TIMEOUT_S + 60)
    noticed_s = time.monotonic() - began
    job.wait_until(goes_on, TIMEOUT_S + 60)
    on_s = time.monotonic() - began
    is_good = noticed_s <= TIMEOUT_S + 2 and on_s <= TIMEOUT_S + 35 and trial.end() == [0]
    times = {"noticed_s": round(noticed_s, 2), "on_s": round(on_s, 2)}
    return {"workers": workers, "victim": victim, "at_step": step, **times, "ok": is_good}


def before(trial: Trial) -> Facts | None:
    trial.settings, workers = IMPATIENT, trial.rng.choice([2, 3])
    job = trial.start(workers=workers, restarts=1)
    job.wait_until(lambda: len(job.workers()) == workers)
    time.sleep(trial.rng.uniform(0, 1.5))  # until a random moment
    victim, pids = trial.freeze(job)
    time.sleep(0.5)  # time for the workers to meet and open log.txt, if they do
    if (trial.run_dir / "log.txt").exists():
        job.kill()
        return None  # they had met
    gone_s, codes = seconds_until_gone([pids[victim]]) + 0.5, trial.end()
    named = re.search(r"worker (\d) did not reach the rendezvous within ([\d.]+) s", job.err())
    patience_s = float(named[2]) if named else 0.0
    is_good = named is not None and int(named[1]) == victim and codes == [0]
    is_good = is_good and gone_s <= patience_s + START_S and patience_s <= max(TIMEOUT_S, 3 * START_S)
    return {"workers": workers, "victim": victim, "gone_s": gone_s, "patience_s": patience_s, "ok": is_good}


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
            else:
                os.read(os.pipe()[0], 1)

    events.subscribe(event, stick)


def stuck(trial: Trial) -> Facts:
    mark, workers, step = trial.folder / "mark", trial.rng.choice([2, 3]), trial.rng.randrange(1, STEPS)
    rank, event = trial.rng.randrange(workers), trial.rng.choice(["step_start", "backward_end"])
    place = f"{rank}, {step}, {event!r}, {trial.rng.choice(['pause', 'read'])!r}"
    code = f"import faults, pathlib; faults.stick_once(pathlib.Path({str(mark)!r}), {place})"
    trial.settings = {"trainer.timeout_s": 300}
    job = trial.start(workers=workers, program=common.changed_program(trial.folder, code))
    job.wait_until(lambda: mark.exists() and mark.read_text())
    pids, pid = job.workers(), int(mark.read_text())
    time.sleep(trial.rng.uniform(0.0, 0.5))  # until a random moment
    victim = trial.rng.choice([other for other in pids if other != pid])
    os.kill(victim, signal.SIGKILL)
    gone_s, codes = seconds_until_gone([pid]), trial.end()
    ends = [entry["end"] for entry in trial.generations()]
    is_good = ends == [f"worker {pids.index(victim)} vanished", "finished"]
    is_good = is_good and gone_s <= STUCK_S and codes == [0]
    return {"workers": workers, "stuck": place, "killed": pids.index(victim), "gone_s": gone_s, "ok": is_good}


def busy(trial: Trial) -> Facts:
    trial.settings = IMPATIENT
    with common.busy_processes(4):
        trial.start()
        codes = trial.end()
    return {"ok": codes == [0] and len(trial.generations()) == 1}


def stop(trial: Trial, launch: str) -> Facts | None:
    rng, moment = trial.rng, trial.rng.choice(["start", "evaluation", "training"])
    # Before a worker listens for signals, SIGUSR1 would kill it.
    kind = rng.choice(["SIGTERM", "SIGINT", "STOP", *(["SIGUSR1"] if moment != "start" else [])])
    job = trial.start(launch, restarts=0)
    job.wait_until(job.workers)
    if moment == "start":
        time.sleep(rng.uniform(0, 2))
    elif moment == "training":
        trial.wait_for_step(job)
    else:  # after this step an evaluation begins
        job.wait_until(lambda: last_step(trial.run_dir) >= SETTINGS["trainer.eval_every"], JOB_S)
    pids, step = job.workers(), trial.newest_step()
    if not pids:
        job.kill()
        return None  # the run has finished
    if kind == "STOP":
        trial.run_dir.mkdir(exist_ok=True)
        (trial.run_dir / "STOP").touch()
    else:
        os.kill(rng.choice(pids) if kind == "SIGUSR1" else job.pid, signal.Signals[kind])
    gone_s, _ = seconds_until_gone(pids), trial.end()
    history, newest = read_history(trial.run_dir), trial.newest_step()
    limit_s = LIMIT_S + max((entry.get("step_s", 0.0) for entry in history["generations"]), default=0.0)
    limit_s += trial.import_s if moment == "start" else 0.0
    is_good = gone_s < limit_s and newest >= step
    if history["status"] == "stopped":
        is_good = is_good and newest == history["generations"][-1]["to_step"]
    (trial.run_dir / "STOP").unlink(missing_ok=True)
    trial.start(launch)
    is_good = trial.end() == [0] and is_good
    return {"signal": kind, "moment": moment, "gone_s": gone_s, "snapshot": newest, "ok": is_good}


def pause(trial: Trial) -> Facts | None:
    pause_s = trial.rng.uniform(0.3, 0.6) * trial.length_s
    trial.settings = {"trainer.pause_after": pause_s}
    job = trial.start()
    time.sleep(trial.rng.uniform(0, pause_s))
    victim, codes = common.signal_one(job.workers(), signal.SIGKILL, trial.rng), trial.end()
    history = read_history(trial.run_dir)
    if victim is None or history["status"] != "stopped":
        return None  # no worker was killed, or the run had finished
    last = history["generations"][-1]
    late_s = last["seen"] - history["job_began"] - pause_s
    is_good = codes == [0] and late_s < LIMIT_S + last.get("step_s", 0.0)
    trial.settings = {}
    trial.start()
    return {"late_s": round(late_s, 2), "snapshot": last["to_step"], "ok": trial.end() == [0] and is_good}


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Callable[[str], None]]:
    """Mount a tmpfs; yield a function that changes its size."""
    folder.mkdir(parents=True)

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        subprocess.run(command, check=True, capture_output=True)

    mount(f"size={size}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve a folder's files on this machine; yield the address of the web server."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def disk(trial: Trial) -> Facts | None:
    full, size = trial.folder / "disk", trial.rng.choice(["4k", "500k", "2m", "4m"])
    where = trial.rng.choice(["run_dir", "snapshot.path", "cache"])
    launch = trial.rng.choice(["plain", "torchrun"])
    resize = trial.stack.enter_context(small_disk(full, size))
    trial.settings = {"snapshot.keep_last": 100, "snapshot.memory_every": 0}
    if where == "run_dir":
        trial.run_dir = full / "run"
    elif where == "snapshot.path":
        trial.settings["snapshot.path"] = full / "snapshots"
        (trial.folder / "run").mkdir()
        (trial.folder / "run" / "snapshots").symlink_to(full / "snapshots")
    else:
        trial.settings["data.path"] = trial.stack.enter_context(served(ROOT / "data")) + "/input.txt"
        os.environ["XDG_CACHE_HOME"] = str(full)
        trial.stack.callback(os.environ.pop, "XDG_CACHE_HOME")
    job = trial.start(launch)
    (code,) = trial.end()
    sentences = [line for line in job.err().splitlines() if line.startswith("error: ")]
    is_refused = len(sentences) == 1 and "cannot be written to" in sentences[0]
    resize("200m")
    trial.start(launch)
    is_good = trial.end() == [0] and (code == 0 or is_refused) and not OWN_TRACEBACK.search(job.err())
    return {"where": where, "size": size, "launch": launch, "code": code, "said": sentences, "ok": is_good}


FAULTS: dict[str, Callable[[Trial], Facts | None]] = {
    "kill": functools.partial(kill, launch="torchrun"),
    "kill_agents": functools.partial(kill, launch="agents"),
    "kill_plain": functools.partial(kill, launch="plain"),
    "kill_memory": kill_memory,
    "frozen": frozen,
    "before": before,
    "stuck": stuck,
    "busy": busy,
    "stop": functools.partial(stop, launch="torchrun"),
    "stop_plain": functools.partial(stop, launch="plain"),
    "pause": pause,
    "disk": disk,
}


def has_records(trial: Trial, whole: dict[tuple[str, int], float]) -> bool:
    """Return whether the losses `whole` are on record, except those that run.json calls missing.

    The evaluation at the step before the first missing step may be missing, too.
    """
    found = trial.losses()
    missing = [entry["metrics_missing"] for entry in trial.generations() if "metrics_missing" in entry]
    lost = {step for _, step in whole.keys() - found.keys()}
    is_told = all(any(first - 1 <= step <= last for first, last in missing) for step in lost)
    return found.items() <= whole.items() and is_told


def try_faults(folder: Path, names: list[str], arguments: argparse.Namespace, tally: common.Tally) -> None:
    """Put each fault into new runs until it has hit `--trials` of them, and judge these runs."""
    rng, import_s, number = random.Random(arguments.seed), common.seconds_to_import_torch(), 0
    expected, length_s = common.train_undisturbed(folder, SETTINGS)
    whole = Trial(folder, rng, length_s, import_s)
    whole.run_dir = folder / "undisturbed"
    for name in [name for name in names for _ in range(arguments.trials)]:
        facts = None
        while facts is None:
            number += 1
            trial = Trial(folder / f"trial{number}", rng, length_s, import_s, number)
            trial.folder.mkdir()
            with trial.stack:
                facts = FAULTS[name](trial)
                is_same = common.short_hash(trial.run_dir) == expected and has_records(trial, whole.losses())
        common.row(fault=name, **facts, same=is_same)
        tally.add(facts["ok"] and is_same, *trial.jobs)


def storm(folder: Path, arguments: argparse.Namespace, tally: common.Tally) -> None:
    """Train the default run undisturbed, then with kills, and print rows that compare the two."""
    rng, run_dir, undisturbed = random.Random(arguments.seed), folder / "disturbed", folder / "undisturbed"
    settings = {
        "trainer.max_steps": arguments.storm, "trainer.eval_every": 500, "trainer.device": "cpu",
        "trainer.timeout_s": 10, "snapshot.keep_last": 2,
    }  # fmt: skip
    expected, _ = common.train_undisturbed(folder, settings)
    job = common.start(run_dir, settings, restarts=100_000)
    job.wait_until(lambda: read_history(run_dir)["generations"], 600)
    next_at, kills = time.time() + rng.expovariate(1 / arguments.every_s), 0
    while job.is_running():
        time.sleep(0.05)
        if time.time() >= next_at and common.signal_one(job.workers(), signal.SIGKILL, rng) is not None:
            kills += 1
            next_at += rng.expovariate(1 / arguments.every_s)
    history, seconds = read_history(run_dir), []
    for path in (undisturbed, run_dir):  # from the start of the first generation to the last step
        generations = read_history(path)["generations"]
        seconds.append(generations[-1]["seen"] - generations[0]["began"])
    is_same = job.wait() == 0 and common.short_hash(run_dir) == expected
    goodput = seconds[0] / seconds[1]
    told = {key: history[key] for key in ("status", "steps_lost", "seconds_lost", "goodput")}
    common.row(
        kills=kills, seconds=round(seconds[1], 1), goodput=round(goodput, 4), run_json=told, same=is_same
    )
    tally.add(is_same and goodput >= arguments.least, job)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help="by default all")
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--storm", type=int, metavar="STEPS", help="of the run that gets kills")
    parser.add_argument(
        "--every_s", type=float, default=30, help="mean of the exponential times between kills"
    )
    parser.add_argument("--least", type=float, default=0.85, help="goodput to be reached")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--settings", nargs="*", default=[], metavar="KEY=VALUE", help="of runs without storm"
    )
    arguments, tally = parser.parse_args(), common.Tally()
    with common.work_folder() as folder:
        if arguments.storm:
            storm(folder, arguments, tally)
        else:
            SETTINGS.update(word.partition("=")[::2] for word in arguments.settings)
            names = arguments.faults or [name for name in FAULTS if name != "disk" or os.geteuid() == 0]
            try_faults(folder, names, arguments, tally)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
