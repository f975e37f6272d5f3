"""run.json, the history of a run: one entry for each generation that began to train.

A generation is the workers between two restarts.
"""

import contextlib
import json
import logging
import platform
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import pydantic

from mingpt.base.files import BadJson, Count, RunId, Seconds, read_json, reason_of, write_atomic
from mingpt.base.system import count_oom_kills
from mingpt.report.metrics import RunStart
from mingpt.report.writing import MayWrite, ReportFile

MAX_REPEATS = 3  # the job ends after this many consecutive generations that fail at the same step
PHASES = ("start_s", "evaluation_s", "snapshot_wait_s")  # what a generation's time goes to besides steps
log = logging.getLogger(__name__)


class Generation(pydantic.BaseModel):
    """The fields of a generation's entry in run.json that are checked when the file is read.

    The entry may have others. RunHistory says what the fields mean, and what a generation is.
    """

    end: str
    workers: Count = 1
    from_step: Count
    to_step: Count
    restart: pydantic.StrictBool
    began: Seconds
    seen: Seconds
    hosts: list[str] = []
    step_s: Seconds = 0.0
    seconds: Seconds = 0.0
    phases: dict[str, Seconds] = {}
    exact: pydantic.StrictBool = False
    oom_kills: Count = 0


class Change(pydantic.BaseModel):
    """Settings that a user changed on purpose, each "key: old -> new", from `step` on."""

    step: Count
    settings: list[Annotated[str, pydantic.Field(pattern=": .* -> ")]]


class Distrusted(pydantic.BaseModel):
    """Snapshots of steps after `after` that generations before `before_generation` wrote.

    These snapshots are not used, because `workers` may have computed wrongly. Generations (the workers
    between two restarts) are numbered from 1.
    """

    after: Count
    before_generation: Count
    workers: list[str]


class History(pydantic.BaseModel):
    """The fields of run.json that are checked when the file is read; the file has others."""

    id: RunId
    job: str = ""
    generations: list[Generation] = pydantic.Field(min_length=1)
    changes: list[Change] = []
    durable_step: Count = 0
    status: str = ""
    steps_lost: Count = 0
    seconds_lost: Seconds = 0.0
    job_began: Seconds = 0.0
    goodput: Seconds = 1.0
    distrusted: list[Distrusted] = []
    settings: str = ""
    inputs: dict[str, Any] = {}


def read_job_start(history: dict[str, Any]) -> int | None:
    """Return the step from which the newest job started whose start is recorded in `history`.

    `history` is the content of run.json. Returns None if no job's start is recorded there.
    """
    starts = [entry["from_step"] for entry in history["generations"] if not entry["restart"]]
    return starts[-1] if starts else None


def load_history(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of run_dir/run.json; None if the file is missing, unreadable or damaged."""
    try:
        history: dict[str, Any] = read_json(run_dir / "run.json", History)
    except (OSError, BadJson):
        return None  # RunHistory reports a damaged file
    return history


def mark_ended(run_dir: Path, status: str) -> None:
    """If the status in run_dir/run.json is "running", replace "running" with `status`.

    Call this if the job ends before its workers have a RunLogger; a RunLogger records the end itself. A file
    that is missing, damaged or not writable stays as it is, and nothing is raised.
    """
    path = run_dir / "run.json"
    try:
        content = read_json(path, History)
        if content["status"] == "running":
            content["status"] = status
            write_atomic(path, json.dumps(content, indent=1) + "\n", sync="file")
    except (OSError, ValueError, TypeError, KeyError):
        return  # there is no run yet, or run.json is damaged or cannot be written, as the next start logs


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def find_end(last: Mapping[str, Any], start: RunStart, stacks: Path) -> dict[str, Any]:
    """Return the fields "exact", "to_step" and "end" of a generation that did not record its end.

    `last` is the entry of that generation in run.json. The fields follow from `last`, `start.step` and the
    workers' exit reasons in `start.previous`. If `start.previous` is None, "end" names the hosts of `last`
    that are not in `start.hosts`, or says that all workers vanished. `stacks` is the folder to which stuck
    workers write their stacks. If the list of hosts is unchanged, and this host's kernel has killed more
    processes for lack of memory since its boot than `oom_kills` of `last`, "end" also says so.
    """
    reported = start.previous.step() if start.previous else None
    gone = [host for host in last.get("hosts", []) if host not in start.hosts]
    end = f"{', '.join(gone) or 'all workers'} vanished"  # used if no exit reasons are known
    if start.previous:
        end = start.previous.sentence(stacks)
    is_same_host = last.get("hosts") == start.hosts
    if is_same_host and count_oom_kills() > last.get("oom_kills", 0):
        end += ": the kernel killed a process for lack of memory"
    return {
        "exact": reported is not None and reported >= last["to_step"],
        "to_step": max(last["to_step"], reported or 0, start.step),
        "end": end,
    }


class RunHistory:
    """Writes run.json, on a rank that writes to the run folder.

    Constructing a RunHistory reads the file, if there is one; a damaged or unreadable file is renamed to
    damaged-run.json, or a longer name if that is taken, if possible. `note_step` and `note_durable` return
    before the file is written. Times are in seconds since 1970. The file has these fields, among others:

    - `status`: running, finished, stopped or failed
    - `durable_step`: the step of the newest snapshot on disk, as far as known; 0 if none is known
    - `weights_sha256`: the SHA-256, in hex, of the file of weights of the snapshot with which the last
      generation finished or stopped; "" until a generation records such an end
    - `job`: the random token of the last job that passed the checks of its start
    - `job_began`: when the first process began that recorded this `job`
    - `inputs`: fingerprints of the last generation's data and tokenizer, and its software; the results depend
      on these inputs and the settings
    - `generations`: a list of entries, one per generation (workers between two restarts) that began to train

    An entry has these fields, among others:

    - `workers`: the number of workers; `hosts`: the names of their hosts
    - `from_step`: the step from which the generation started
    - `to_step`: the last step that is known to be complete
    - `exact`: true if a worker reported, when the generation ended, that it had come at least as far as was
      recorded
    - `end`: how the generation ended; "running" before that is known
    - `restart`: false for a job's first generation
    - `began`: when the generation's start was complete, and this entry was added
    - `seen`: when the generation last recorded a step or its end
    - `seconds`: the time between `began` and `seen`, by a monotonic clock
    - `step_s`: the last recorded mean seconds per step
    - `oom_kills`: how many processes of this host the kernel killed for lack of memory, from boot to `began`
    - `phases`: the seconds of the start (from the beginning of the process to `began`), of evaluations, and
      of waits for snapshots, as `start_s`, `evaluation_s` and `snapshot_wait_s`
    """

    def __init__(
        self, run_dir: Path, run_id: str, versions: dict[str, str], may_write: MayWrite = lambda: True
    ) -> None:
        self.path = run_dir / "run.json"
        self.file = ReportFile(self.path, may_write)
        self.background = ThreadPoolExecutor(max_workers=1)  # so that no step waits for an fsync
        self.queued: Future[None] | None = None  # the last write whose end nothing waits for
        self.lock = threading.Lock()  # a thread that ends the process may record a failure during a step
        self.content: dict[str, Any] = {
            "id": run_id,
            "status": "running",
            "generations": [],
            "changes": [],
            "steps_lost": 0,
            "seconds_lost": 0.0,
            "goodput": 1.0,
            "durable_step": 0,
        }
        try:
            self.content |= read_json(self.path, History)
        except FileNotFoundError:
            pass  # a new run
        except (OSError, BadJson) as error:
            aside = self.path.with_name("damaged-run.json")
            if aside.exists():
                aside = self.path.with_name(f"damaged-run-{time.time_ns()}.json")
            log.warning(
                f"{self.path} cannot be used ({reason_of(error)}): it is set aside as {aside.name} if "
                "possible"
            )
            with contextlib.suppress(OSError):  # if the rename fails, the new file replaces the damaged one
                self.path.replace(aside)
        self.content["id"] = run_id
        self.content["versions"] = versions | {"python": platform.python_version()}
        self.generations: list[dict[str, Any]] = self.content["generations"]

    def start_generation(self, start: RunStart) -> str | None:
        """Add this generation's entry to run.json. Call this method before any other.

        Returns one line about the end of the previous generation (see `close_generation`). Returns None if
        there is nothing to tell, or no previous generation.
        """
        if start.changes:
            self.content["changes"].append({"step": start.step, "settings": start.changes})
        sentence = self.close_generation(self.generations[-1], start) if self.generations else None
        now = time.time()
        self.began_at = time.monotonic()
        start_s = round(self.began_at - start.process_began, 3)
        entry = {
            "workers": start.workers,
            "hosts": start.hosts,
            "from_step": start.step,
            "to_step": start.step,
            "exact": False,
            "restart": start.is_restart,
            "began": now,
            "seen": now,
            "seconds": 0.0,
            "phases": dict.fromkeys(PHASES, 0.0) | {"start_s": start_s},
            "end": "running",
            "oom_kills": count_oom_kills(),
        }
        self.generations.append(entry)
        # In a restart, the newest snapshot may be lost with its disk, but its step must stay on record.
        earlier = self.content["durable_step"] if start.is_restart else 0
        self.content |= {"status": "running", "durable_step": max(earlier, start.durable_step)}
        self.content["weights_sha256"] = ""  # of an earlier end
        if self.content.get("job") != start.job or "job_began" not in self.content:
            self.content |= {"job": start.job, "job_began": now - start_s}
        self.content["settings"] = start.settings
        self.record({}, {})
        return sentence

    def close_generation(self, last: dict[str, Any], start: RunStart) -> str | None:
        """Count the steps of the previous generation that are done again; complete the record of its end.

        `last` is the entry of that generation in run.json, and `start` begins the next one. Returns one line
        about the end. Returns None if the end was on record, and `start` is that of a new job.
        """
        recorded, waited, was_running = last["to_step"], 0.0, last["end"] == "running"
        if was_running:
            last |= find_end(last, start, self.path.with_name("stacks"))
            # In a restart, the time from the last record until now is lost.
            waited = max(0.0, time.time() - last["seen"]) if start.is_restart else 0.0
        # After an orderly end, steps are done again only if a user has deleted snapshots.
        self.content["steps_lost"] += max(0, last["to_step"] - start.step)
        repeated = max(0, recorded - start.step) * last.get("step_s", 0.0)
        self.content["seconds_lost"] = round(self.content["seconds_lost"] + waited + repeated, 3)
        if not was_running and not start.is_restart:
            return None
        return (
            f"{last['end']} at step {last['to_step']}; resumed from {start.step} with "
            f"{plural(start.workers, 'worker')}"
        )

    def repeated_failure(self) -> str | None:
        """Return one sentence if this job's MAX_REPEATS previous generations failed at the same step.

        Otherwise, or if `exact` (see RunHistory) is false for one of them, returns None. A generation that
        was stopped in order, for example so that hosts could join, has not failed.
        """
        if not self.generations[-1]["restart"]:
            return None  # a user started the job again, perhaps with the cause removed
        ended = [entry for entry in self.generations if entry["end"] != "running"][-MAX_REPEATS:]
        is_exact = all(entry.get("exact") for entry in ended)
        same_step = len({entry["to_step"] for entry in ended}) == 1 and is_exact
        if len(ended) < MAX_REPEATS or not same_step or not all(entry["restart"] for entry in ended[1:]):
            return None
        if any(entry["end"].startswith("stopped by") for entry in ended):
            return None  # stopped in order, perhaps for a node that joined or left
        return (
            f"{MAX_REPEATS} generations failed one after the other at step {ended[0]['to_step'] + 1} "
            f"({ended[-1]['end']}): a restart would repeat it"
        )

    def note_missing(self, first_step: int, last_step: int) -> None:
        """Record that the metrics from `first_step` to `last_step` could not be written and are lost."""
        self.record({}, {"metrics_missing": [first_step, last_step]})

    def note_durable(self, step: int) -> None:
        """Record that the newest snapshot on disk is the snapshot of `step`; 0 means that there is none."""
        self.record({"durable_step": step}, {}, waits=False)

    def note_skipped(self, count: int) -> None:
        """Record that the run has skipped `count` updates so far."""
        self.record({"updates_skipped": count}, {})

    def note_distrusted(self, step: int, after: int, before_generation: int, workers: list[str]) -> None:
        """Record that `workers` may have computed wrongly, as found after `step`.

        Snapshots of steps after `after`, written before generation `before_generation`, are not used. Also
        sets `durable_step` to 0. Call this before any of these snapshots is set aside (renamed): the record
        must exist even if this worker is killed during the renames.
        """
        entry = {"step": step, "after": after, "before_generation": before_generation, "workers": workers}
        distrusted = [*self.content.get("distrusted", []), entry]
        # The durable step is not known until the snapshots are set aside.
        self.record({"distrusted": distrusted, "durable_step": 0}, {})

    def note_step(self, step: int, step_s: float | None, phases: dict[str, float] | None = None) -> None:
        """Record that this generation has completed `step`.

        `step_s` is the number of seconds per step; None leaves the recorded number unchanged. `phases` maps
        some or all of PHASES to their total seconds so far; the records of other phases stay unchanged.
        """
        self.record({}, self.progress(step, step_s, phases), waits=False)

    def progress(self, step: int, step_s: float | None, phases: dict[str, float] | None) -> dict[str, Any]:
        """Return {name: value} of the fields that `note_step` sets in the generation's entry of run.json."""
        entry = {
            "to_step": step,
            "seen": time.time(),
            "seconds": round(time.monotonic() - self.began_at, 3),
            "phases": {name: round(phase_s, 3) for name, phase_s in (phases or {}).items()},
        }
        return entry if step_s is None else entry | {"step_s": step_s}

    def end(self, status: str, step: int, how: str, phases: dict[str, float] | None = None) -> None:
        entry = self.progress(step, None, phases) | {"exact": True, "end": how}
        self.record({"status": status}, entry)

    def summary(self) -> str:
        """Return one line on the whole run: generations, steps done twice, seconds lost, and goodput."""
        return (
            f"{plural(len(self.generations), 'generation')}, {self.content['steps_lost']} steps done twice, "
            f"{self.content['seconds_lost']:.1f} s lost, goodput {self.content['goodput']:.1%}"
        )

    def record(self, content: dict[str, Any], entry: dict[str, Any], waits: bool = True) -> None:
        """Set the fields `content` of run.json and `entry` of the last entry, and write run.json in a thread.

        With `waits`, return only after the write has ended, or failed. If the last earlier call had no
        `waits`, and its write has not begun yet, only the new content is written. Any thread may call this.
        """
        with self.lock:
            last = self.generations[-1]
            last |= entry | {"phases": last["phases"] | entry.get("phases", {})}
            self.content |= content
            if self.queued is not None:
                self.queued.cancel()  # has no effect if the write has begun
            writing = self.background.submit(self.file.replace, self.encode())
            self.queued = None if waits else writing
        if waits:
            writing.result()

    def encode(self) -> str:
        """Update the goodput (the share of the time that was not lost), and return the file's content."""
        # A run's time is the time of its generations and of the restarts between them. The time between an
        # orderly stop and the next job does not count.
        trained_s = sum(entry.get("seconds", 0.0) for entry in self.generations)
        between_s = sum(
            max(0.0, after["began"] - before["seen"])
            for before, after in pairwise(self.generations)
            if after["restart"]
        )
        lost_s = self.content["seconds_lost"]
        self.content["goodput"] = round(1 - lost_s / max(trained_s + between_s, lost_s, 1e-9), 4)
        return json.dumps(self.content, indent=1) + "\n"
