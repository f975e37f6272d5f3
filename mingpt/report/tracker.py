"""Sinks that hand values to a package in a thread of its own: it may fail, block for ever or be absent.

An experiment tracker is a package with `init`, `log(values, step=...)` and `finish`, as wandb has them.
"""

import contextlib
import functools
import html
import importlib
import inspect
import logging
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mingpt.base.files import reason_of
from mingpt.report.files import read_records, record_key
from mingpt.report.metrics import RunInfo, Sink, Values

MAX_QUEUED = 2000  # records; what comes while so many wait is left out
FLUSH_S = 1.0  # that the thread which writes snapshots waits at most
POLL_S = 0.05
CLOSE_S = 5.0  # that the end of a run waits at most
Task = Callable[[], None]
STYLES = re.compile(r"\x1b\[[0-9;]*m")  # of a terminal
MAX_LINES = 20  # of what a package prints that the log takes
log = logging.getLogger(__name__)


class Destination:
    """What a follower hands its values to.

    All methods are called in one thread, in their order. They may raise anything, and block.
    """

    label = ""  # names it in messages
    package = ""  # that it needs

    def open(self, earlier: "EarlierRecords") -> None:
        """Make ready for values past `earlier.step`, and add what is missing up to there."""

    def log(self, step: int, values: Values) -> None:
        """Values of metrics after `step`."""

    def log_text(self, step: int, name: str, text: str) -> None:
        """A text after `step`."""

    def flush(self) -> None:
        """Write what was logged."""

    def close(self) -> None:
        """The run has ended, or this generation of it."""


class EarlierRecords:
    """The records of earlier generations up to `step`, from which this one goes on.

    They are read while they are iterated over. Construct it before this generation has logged a record.
    """

    def __init__(self, run: RunInfo, step: int) -> None:
        self.run, self.step, self.path = run, step, run.run_dir / "metrics.jsonl"
        self.n_bytes = self.path.stat().st_size if self.path.exists() else 0

    def __iter__(self) -> Iterator[tuple[int, dict[str, float]]]:
        """(step, values), in their order. Raises OSError."""
        if self.step == 0:
            return  # they come again
        for record in read_records(self.path, self.n_bytes):
            if record["step"] <= self.step:
                yield record["step"], numbers({key: record[key] for key in record if key != "step"})


def numbers(values: dict[str, Any] | Values) -> dict[str, float]:
    """Those values that are numbers."""
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


class Follower(Sink):
    """Hands values to a destination in a thread of its own.

    Whatever happens there, the run goes on: one line says so, and the destination gets no more values. A
    call returns at once, but for `flush` (FLUSH_S at most) and `close` (CLOSE_S at most).
    """

    def __init__(self, run: RunInfo, destination: Destination) -> None:
        self.run, self.destination = run, destination
        self.tasks: queue.Queue[Task | None] = queue.Queue(MAX_QUEUED)
        self.thread: threading.Thread | None = None
        self.is_over = False  # it has failed, or was closed
        self.is_late = False  # it has let a flush wait, which no other one does until it has caught up
        self.is_reported = False
        self.reporting = threading.Lock()

    def rewind(self, step: int) -> None:
        """Open the destination, in a thread. What is logged meanwhile is queued."""
        try:
            earlier = EarlierRecords(self.run, step)
        except OSError as error:
            self._fail(error)
            return
        work = functools.partial(self._work, earlier)
        self.thread = threading.Thread(target=work, name=self.destination.package, daemon=True)
        self.thread.start()

    def log(self, step: int, values: Values) -> None:
        self._put(functools.partial(self.destination.log, step, numbers(values)))

    def log_text(self, step: int, name: str, text: str) -> None:
        self._put(functools.partial(self.destination.log_text, step, name, text))

    def flush(self) -> None:
        if self.is_over or self.is_late:
            return
        is_flushed = threading.Event()
        if not self._put(functools.partial(self._flush, is_flushed)):
            return
        deadline = time.monotonic() + FLUSH_S
        while not is_flushed.wait(POLL_S) and not self.is_over:
            if time.monotonic() > deadline:
                self.is_late = not is_flushed.is_set()
                return

    def close(self) -> None:
        if self.is_over or self.thread is None:
            return
        deadline = time.monotonic() + CLOSE_S
        try:
            self.tasks.put(None, timeout=CLOSE_S)
        except queue.Full:
            pass  # the thread is still alive then, which is reported below
        self.thread.join(max(0.0, deadline - time.monotonic()))
        if self.thread.is_alive():
            self._report(f"did not end within {CLOSE_S:g} s and is given up: it may lack the last values")
        self.is_over = True

    def _put(self, task: Task) -> bool:
        """Whether it is queued."""
        if self.is_over:
            return False
        try:
            self.tasks.put_nowait(task)
            return True
        except queue.Full:
            self._report(f"is too slow: {MAX_QUEUED} records wait, and those that come now are left out")
            return False

    def _flush(self, is_flushed: threading.Event) -> None:
        self.destination.flush()
        is_flushed.set()
        self.is_late = False

    def _work(self, earlier: EarlierRecords) -> None:
        """Open the destination, do the tasks in their order, close it. Raises nothing: a line says why."""
        try:
            if self.run.may_write():
                self.destination.open(earlier)
            for task in iter(self.tasks.get, None):
                if not self.run.may_write():
                    break  # the run is another job's by now
                task()
            else:
                self.destination.close()
        except ModuleNotFoundError as error:
            name = (error.name or self.destination.package).split(".")[0]
            self._report(f"needs the package {name}, which is not installed: the run goes on without it")
        except BaseException as error:  # a package's own, SystemExit too, and no reason to end a run
            self._fail(error)
        self.is_over = True

    def _fail(self, error: BaseException) -> None:
        self._report(f"has failed ({reason_of(error)[:200]}): the run goes on without it")
        self.is_over = True

    def _report(self, what: str) -> None:
        """Say once what is wrong, unless the run has ended."""
        with self.reporting:
            is_first = not self.is_reported and not self.is_over
            self.is_reported = True
        if is_first:
            log.warning("%s %s", self.destination.label, what)


class Tracker(Destination):
    """One run of the tracker for the whole run: a later generation goes on with it, by the run's id.

    A step that the tracker has is not sent again, and one that it lacks comes from metrics.jsonl. Credentials
    and where the values are kept are the package's own matter, and <PACKAGE>_PROJECT is obeyed.
    """

    def __init__(self, run: RunInfo, package: str) -> None:
        self.run, self.package, self.label = run, package, f"report.tracker={package}"
        self.module: Any = None
        self.first_step = 0  # that the tracker lacks
        self.records: set[tuple[int, bool]] = set()  # sent, at the step from which this generation goes on

    def open(self, earlier: EarlierRecords) -> None:
        os.environ.setdefault("WANDB_CONSOLE", "off")  # it would read along what the run writes to stderr
        self.module = importlib.import_module(self.package)
        # LossPlot imports it in another thread, and trackio drops all values while that is under way.
        with contextlib.suppress(ImportError):  # LossPlot says so
            importlib.import_module("matplotlib.backends.backend_agg")
            importlib.import_module("matplotlib.figure")
        tracked = self.module.init(**self.accepted(self.init_arguments()))
        first_step = next_step(tracked)
        if first_step is None:  # unknown: assume that it has what earlier generations sent
            first_step = earlier.step + 1 if len(self.run.starts) > 1 else 0
        self.first_step = first_step
        for step, values in earlier:
            self.log(step, values)
            if step == earlier.step:
                self.records.add(record_key({"step": step, **values}))

    def init_arguments(self) -> dict[str, Any]:
        folder = self.run.run_dir.resolve()
        name = f"{folder.name}-{self.run.run_id[:8]}"  # trackio finds a run by its name
        return {
            "project": os.environ.get(f"{self.package.upper()}_PROJECT") or project_name(folder),
            "name": name,
            "id": self.run.run_id,
            "resume": "allow",
            "config": self.run.settings,
            "dir": str(self.run.run_dir),
        }

    def accepted(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Those that the package's `init` takes."""
        parameters = inspect.signature(self.module.init).parameters
        if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            return arguments
        return {name: value for name, value in arguments.items() if name in parameters}

    def log(self, step: int, values: Values) -> None:
        if step >= self.first_step and record_key({"step": step, **values}) not in self.records:
            # The number of the generation in each record shows where one ended.
            self.module.log({**values, "generation": len(self.run.starts)}, step=step)

    def log_text(self, step: int, name: str, text: str) -> None:
        shown = self.as_media(text)
        if step >= self.first_step and shown is not None:
            self.module.log({name: shown}, step=step)

    def as_media(self, text: str) -> Any:
        """The text as a type of the package; None if it has none."""
        if hasattr(self.module, "Text"):
            return self.module.Text(text)
        if hasattr(self.module, "Html"):
            return self.module.Html(f"<pre>{html.escape(text)}</pre>")
        return None

    def close(self) -> None:
        self.module.finish()


def project_name(folder: Path) -> str:
    """That of the folder around run_dir, in characters that trackers take."""
    return re.sub(r"[^\w.-]+", "-", folder.parent.name).strip("-") or "mingpt"


def next_step(tracked: Any) -> int | None:
    """The first step that a tracker's run lacks: 0 for a new one; None if it has no such number."""
    for name in ("step", "_next_step"):  # of wandb; of trackio, which has no public name for it
        step = getattr(tracked, name, None)
        if isinstance(step, int):
            return step
    return None


class TrackerFollower(Follower):
    """Keeps what the package prints off stdout, too."""

    def __init__(self, run: RunInfo, package: str) -> None:
        super().__init__(run, Tracker(run, package))
        self.stdout = StdoutOfMainThread(self.destination.label)

    def rewind(self, step: int) -> None:
        self.stdout.install()
        super().rewind(step)

    def close(self) -> None:
        super().close()
        self.stdout.remove()


class StdoutOfMainThread:
    """Stands for sys.stdout: what other threads print goes to the log, MAX_LINES lines of it."""

    def __init__(self, label: str) -> None:
        self.label, self.real, self.n_lines, self.begun = label, sys.stdout, 0, ""
        self.writing = threading.Lock()

    def install(self) -> None:
        if sys.stdout is not self:
            self.real, sys.stdout = sys.stdout, self  # type: ignore[assignment]

    def remove(self) -> None:
        if sys.stdout is self:
            sys.stdout = self.real

    def write(self, text: str) -> int:
        if threading.current_thread() is threading.main_thread():
            return self.real.write(text)
        with self.writing:
            *lines, self.begun = (self.begun + text).split("\n")
            lines = [STYLES.sub("", line).strip() for line in lines if line.strip()]
            taken = lines[: max(0, MAX_LINES - self.n_lines)]
            self.n_lines += len(taken)
        for line in taken:
            log.info("%s: %s", self.label, line)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
