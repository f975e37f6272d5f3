"""Faults at chosen moments: does each run end with the bits and records of an undisturbed run?

    python benchmarks/schedules.py                       # 60 seeded schedules, half an hour on two cores
    python benchmarks/schedules.py --schedules 1         # a minute
    python benchmarks/schedules.py kill stop --trials 1  # two of FAULTS, a minute or two; disk needs root
    python benchmarks/schedules.py --events FILE         # the faults that a file describes

A seeded schedule has 1 to 5 kills. After each kill there are 1 to 4 workers. FAULTS are schedules with random
steps, ranks and delays. FILE is TOML with the fields of Schedule, and of Event for each event.

Prints a row per schedule, as JSON. `gone_s` is the time from the last event until the other workers were
gone, and `on_s` until the next generation began. The exit code is 1 unless all events happen, all limits are
kept, and all runs have the bits and records.
"""

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import common
from support.jobs import Job, free_port, is_alive, read_history, read_metric

from mingpt.base import events
from mingpt.tools.jobs import torchrun

STEPS, TIMEOUT_S, JOB_S, MEMORY_EVERY = 150, 10, 300, 5
SETTINGS = common.SMALL | {
    "data.block_size": 64, "data.val_fraction": 0.2, "model.n_embd": 64, "trainer.batch_size": 16,
    "trainer.micro_batch_size": 2, "trainer.max_steps": STEPS, "trainer.eval_every": 40,
    "trainer.sample_tokens": 200, "snapshot.every": 10, "snapshot.keep_last": 100,
}  # fmt: skip
TO_WORKER = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "stop": signal.SIGUSR1}
TO_JOB = {"stop job": signal.SIGTERM, "interrupt job": signal.SIGINT}


@dataclass
class Event:
    """What a worker does once, when it is at the event `at` of mingpt.base.events in `step` or later.

    `what` is a key of TO_WORKER or TO_JOB, "stop file" or "fill" (the disk). The worker is `rank`, or the
    first that comes there. It acts `delay_s` later. A signal goes to the worker that is `of` ranks after it.
    """

    what: str
    at: str = "step_start"
    step: int = 0
    rank: int | None = None
    of: int = 0
    delay_s: float = 0.0


@dataclass
class Schedule:
    """A job by "torchrun", "plain" python or "agents", two of torchrun; its events, and what must hold.

    `disk` is run_dir or snapshot.path, whose folder is then on a small disk. The limits are for gone_s and
    on_s. The job may do `may_lose` steps again. If it `ends`, the same command has to finish the run.
    """

    events: list[Event]
    launch: str = "torchrun"
    workers: int = 2
    settings: dict[str, Any] = field(default_factory=dict)
    disk: str = ""
    busy: int = 0
    gone_limit_s: float = JOB_S
    on_limit_s: float = JOB_S
    may_lose: int = STEPS
    says: str = ""
    ends: bool = False


class Actor:
    def __init__(self, folder: Path) -> None:
        self.folder, self.step, self.rank = folder, 0, int(os.environ.get("RANK", -1))
        if self.rank < 0:
            return  # this is the agent of plain python
        (folder / f"pid-{self.rank}").write_text(str(os.getpid()))
        for name in ("run_start", "step_start", "step_end"):
            events.subscribe(name, self.note_step)
        for number, event in enumerate(json.loads((folder / "events.json").read_text())):
            events.subscribe(event["at"], functools.partial(self.arrive, number, Event(**event)))

    def note_step(self, state: Any = None, step: int = 0, **_: Any) -> None:
        self.step = state.step if state else step

    def arrive(self, number: int, event: Event, /, **details: Any) -> None:
        is_time = self.step >= event.step or event.at == "worker_start"
        if event.at == "file_progress" and is_time:
            is_time = details["name"].endswith(".safetensors") and 2 * details["written"] >= details["size"]
        if not is_time or event.rank not in (None, self.rank):
            return
        try:
            (self.folder / f"claimed-{number}").open("x").close()
        except FileExistsError:
            return  # it has been done
        if event.delay_s:
            threading.Timer(event.delay_s, self.act, [number, event]).start()
        else:
            self.act(number, event)

    def act(self, number: int, event: Event) -> None:
        victim = (self.rank + event.of) % int(os.environ["WORLD_SIZE"])
        line = {"event": number, "time": time.time(), "step": self.step, "rank": self.rank, "victim": victim}
        with open(self.folder / "done.jsonl", "ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")
        if event.what in TO_WORKER:
            os.kill(int((self.folder / f"pid-{victim}").read_text()), TO_WORKER[event.what])
        elif event.what in TO_JOB:
            os.kill(os.getppid(), TO_JOB[event.what])
        elif event.what == "stop file":
            (self.folder / "run").mkdir(exist_ok=True)
            (self.folder / "run" / "STOP").touch()
        elif event.what == "fill":
            with contextlib.suppress(OSError), open(self.folder / "disk/filler", "wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))


def random_moment(rng: random.Random) -> dict[str, Any]:
    if rng.random() < 0.2:
        return {"at": "worker_start", "rank": rng.randrange(2), "delay_s": rng.uniform(0, 3)}
    at = rng.choice(["step_start", "backward_end", "reduction_start", "evaluation_start", "file_progress"])
    rank = None if at in ("evaluation_start", "file_progress") else rng.randrange(2)  # perhaps one has them
    return {"at": at, "step": rng.randrange(2, STEPS - 40), "rank": rank, "delay_s": rng.uniform(0, 0.2)}


def kill(rng: random.Random, launch: str) -> Schedule:
    return Schedule([Event("kill", **random_moment(rng))], launch)


def kill_memory(rng: random.Random) -> Schedule:
    settings = {"snapshot.memory_every": MEMORY_EVERY, "snapshot.every": 1000}
    settings |= rng.choice(list(common.STRATEGIES.values()))
    step, of = rng.randrange(2 * MEMORY_EVERY, STEPS - 20), rng.randrange(2)  # the writer, or the next one
    event = Event("kill", "file_progress", step, of=of)
    return Schedule([event], "plain", rng.choice([2, 3]), settings, may_lose=2 * MEMORY_EVERY)


def frozen(rng: random.Random) -> Schedule:
    workers = rng.choice([2, 3])
    event = Event("freeze", step=rng.randrange(2, STEPS - 20), rank=rng.randrange(workers))
    limits: dict[str, Any] = {"gone_limit_s": TIMEOUT_S + 2, "on_limit_s": TIMEOUT_S + 35}
    return Schedule([event], workers=workers, settings={"trainer.timeout_s": TIMEOUT_S}, **limits)


def stop(rng: random.Random, launch: str) -> Schedule:
    moment, ways = random_moment(rng), ["stop job", "interrupt job", "stop file"]
    if moment["at"] != "worker_start":
        ways.append("stop")  # before a worker listens for signals, SIGUSR1 would kill it
    return Schedule([Event(rng.choice(ways), **moment)], launch, gone_limit_s=2.5, ends=True)


def full_disk(rng: random.Random) -> Schedule:
    at = rng.choice(["worker_start", "step_start", "file_progress"])
    event, launch = Event("fill", at, rng.randrange(STEPS - 20)), rng.choice(["plain", "torchrun"])
    disk = rng.choice(["run_dir", "snapshot.path"])
    return Schedule([event], launch, disk=disk, says=" cannot be written to", ends=True)


FAULTS: dict[str, Callable[[random.Random], Schedule]] = {
    "kill": functools.partial(kill, launch="torchrun"),
    "kill_agents": functools.partial(kill, launch="agents"),
    "kill_plain": functools.partial(kill, launch="plain"),
    "kill_memory": kill_memory,
    "frozen": frozen,
    "busy": lambda _: Schedule([], settings={"trainer.timeout_s": TIMEOUT_S}, busy=4),
    "stop": functools.partial(stop, launch="torchrun"),
    "stop_plain": functools.partial(stop, launch="plain"),
    "disk": full_disk,
}


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Trial:
    def __init__(self, folder: Path, schedule: Schedule) -> None:
        self.folder, self.schedule, self.run_dir = folder, schedule, folder / "run"
        (folder / "memory").mkdir(parents=True)
        self.settings = SETTINGS | schedule.settings | {"snapshot.memory_path": folder / "memory"}
        if schedule.disk == "run_dir":
            self.run_dir = folder / "disk" / "run"
        elif schedule.disk:
            self.settings |= {schedule.disk: folder / "disk" / "snapshots"}
            self.run_dir.mkdir()
            (self.run_dir / "snapshots").symlink_to(folder / "disk" / "snapshots")
        (folder / "events.json").write_text(json.dumps(asdict(schedule)["events"]))
        code = f"import pathlib, schedules; schedules.Actor(pathlib.Path({str(folder)!r}))"
        self.program = common.changed_program(folder, code)

    def start(self) -> None:
        if self.schedule.launch == "agents":
            words = [self.program, f"run_dir={self.run_dir}", *common.arguments_of(self.settings)]
            meeting = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint=localhost:{free_port()}"]
            command = [*torchrun(1, 3, meeting), *words]
            self.jobs = [Job(command, self.folder / f"job{agent}") for agent in range(2)]
            return
        named: dict[str, Any] = {"output": self.folder / "job", "program": self.program}
        named |= {"workers": self.schedule.workers, "restarts": 3, "launch": self.schedule.launch}
        self.jobs = [common.start(self.run_dir, self.settings, **named)]

    def done(self) -> list[dict[str, Any]]:
        path = self.folder / "done.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def seconds_until_gone(self, last: dict[str, Any]) -> float:
        hit = last["victim"] if self.schedule.events[last["event"]].what in ("kill", "freeze") else None
        paths = [path for path in self.folder.glob("pid-*") if path.name != f"pid-{hit}"]
        pids = [int(path.read_text()) for path in paths]
        while any(map(is_alive, pids)) and time.time() < last["time"] + JOB_S:
            time.sleep(0.002)
        return round(time.time() - last["time"], 2)

    def run(self, import_s: float) -> tuple[dict[str, Any], list[str]]:
        schedule = self.schedule
        self.start()
        while len(self.done()) < len(schedule.events) and any(job.is_running() for job in self.jobs):
            time.sleep(0.005)
        done = self.done()
        gone_s, on_s, lost = self.seconds_until_gone(done[-1]) if done else 0.0, 0.0, 0
        codes = [[common.exit_code(job, JOB_S) for job in self.jobs]]
        said = "".join(job.err() for job in self.jobs)
        is_stopped = read_history(self.run_dir)["status"] == "stopped"
        if schedule.ends:
            (self.run_dir / "STOP").unlink(missing_ok=True)
            (self.folder / "disk" / "filler").unlink(missing_ok=True)
            self.start()
            codes.append([common.exit_code(job, JOB_S) for job in self.jobs])
        generations = read_history(self.run_dir)["generations"]
        if len(generations) > 1 and done:
            lost = generations[-2]["to_step"] - generations[-1]["from_step"]
            on_s = 0.0 if schedule.ends else round(generations[-1]["began"] - done[-1]["time"], 2)
        starts = [event for event in schedule.events if event.at == "worker_start"]
        held = {
            "events": len(done) == len(schedule.events) and (done != [] or len(generations) == 1),
            "code": not any(codes[-1]),
            "said": schedule.says in said,
            "gone_s": gone_s <= schedule.gone_limit_s + (import_s if starts else 0),
            "on_s": on_s <= schedule.on_limit_s,
            "lost": lost <= (0 if is_stopped else schedule.may_lose),
            "memory": not any((self.folder / "memory").iterdir()),
        }
        facts = {"codes": codes, "gone_s": gone_s, "on_s": on_s, "lost": lost, "done": done}
        return facts, [name for name, is_so in held.items() if not is_so]


def has_records(run_dir: Path, undisturbed: Path) -> bool:
    """Return whether the losses of `undisturbed` are on record, or missing, as run.json says."""
    told = [entry.get("metrics_missing", [0, -1]) for entry in read_history(run_dir)["generations"]]
    # The evaluation at the step before the first missing step may be missing, too.
    missing = {step for first, last in told for step in range(first - 1, last + 1)}
    for name in ("train/loss", "val/loss"):
        found, whole = read_metric(run_dir, name), read_metric(undisturbed, name)
        if not found.items() <= whole.items() or not whole.keys() - found.keys() <= missing:
            return False
    return True


def try_schedules(folder: Path, chosen: Sequence[tuple[str, Schedule]], tally: common.Tally) -> None:
    expected = common.train_undisturbed(folder, SETTINGS)
    import_s = common.seconds_to_import_torch()
    for number, (name, schedule) in enumerate(chosen):
        trial = Trial(folder / f"trial{number}", schedule)
        mounted = small_disk(trial.folder / "disk") if schedule.disk else contextlib.nullcontext()
        with mounted, common.busy_processes(schedule.busy):
            facts, problems = trial.run(import_s)
            same = common.short_hash(trial.run_dir) == expected
            same = same and has_records(trial.run_dir, folder / "undisturbed")
        common.row(fault=name, **asdict(schedule), **facts, same=same, problems=problems)
        tally.add(same and not problems, *trial.jobs)


def try_seeds(folder: Path, first_seed: int, count: int, tally: common.Tally) -> None:
    from mingpt.tools.verify import find_problems, last_manifest, make_schedule, train_undisturbed

    settings = train_undisturbed(folder)
    common.row(undisturbed=last_manifest(folder / "undisturbed").sha256, workers=1)
    for seed in range(first_seed, first_seed + count):
        rng = random.Random(f"schedule {seed}")
        began, workers = time.monotonic(), rng.randint(1, 4)
        kills = make_schedule(seed, rng.randint(1, 5), [1, 2, 3, 4])
        problems, digest = find_problems(seed, kills, workers, folder, settings)
        common.row(
            seed=seed, workers=workers, kills=kills,
            seconds=round(time.monotonic() - began, 1), identical=not problems, problems=problems,
            disturbed=digest,
        )  # fmt: skip
        tally.add(not problems)


def main() -> int:
    parser = common.argument_parser(__doc__)
    parser.add_argument("faults", nargs="*", metavar="FAULT", help=", ".join(FAULTS))
    parser.add_argument("--trials", type=int, default=5, help="of each fault, or of the file")
    parser.add_argument("--seed", type=int, default=1, help="of the faults")
    parser.add_argument("--events", type=Path, metavar="FILE")
    parser.add_argument("--schedules", type=int, default=60)
    parser.add_argument("--first_seed", type=int, default=1)
    given, tally = parser.parse_args(), common.Tally()
    rng, chosen = random.Random(given.seed), list[tuple[str, Schedule]]()
    if given.events:
        content = tomllib.loads(given.events.read_text())
        schedule = Schedule(**content | {"events": [Event(**event) for event in content["events"]]})
        chosen = [(given.events.name, schedule)] * given.trials
    chosen += [(name, FAULTS[name](rng)) for name in given.faults for _ in range(given.trials)]
    with common.work_folder() as folder:
        if chosen:
            try_schedules(folder, chosen, tally)
        else:
            try_seeds(folder, given.first_seed, given.schedules, tally)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
