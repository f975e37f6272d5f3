"""Sinks that hand values to a package in a thread of its own: it may fail, block for ever or be absent."""

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from mingpt.report.files import describe, read_records
from mingpt.report.sink import RunInfo, Sink, Values

log = logging.getLogger(__name__)

MAX_QUEUED = 2000  # records; what comes while so many wait is left out
FLUSH_S = 1.0  # that the thread which writes snapshots waits at most
POLL_S = 0.05
CLOSE_S = 5.0  # that the end of a run waits at most
Task = Callable[[], None]


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
        """(step, values), in their order, those that only the snapshot has last. Raises OSError."""
        if self.step == 0:
            return  # they come again
        for record in itertools.chain(read_records(self.path, self.n_bytes), self.run.unwritten):
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
        reason = (describe(error).splitlines() or [""])[0][:200]
        self._report(f"has failed ({reason}): the run goes on without it")
        self.is_over = True

    def _report(self, what: str) -> None:
        """Say once what is wrong, unless the run has ended."""
        with self.reporting:
            is_first = not self.is_reported and not self.is_over
            self.is_reported = True
        if is_first:
            log.warning("%s %s", self.destination.label, what)
