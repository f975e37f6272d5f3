"""Write a run's report files. If one cannot be written, the run goes on and the content is tried again.

metrics.jsonl has a JSON object per record, written at once, each with its `step`. The records of all
generations (a generation is the workers between two restarts) make one curve.
"""

import functools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mingpt.base.files import parse_json, reason_of, write_all, write_atomic
from mingpt.report.metrics import RunInfo, Sink, Values

log = logging.getLogger(__name__)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, none if it is missing; log other lines. Raises OSError."""
    return (record for _, record in read_lines(path) if record is not None)


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (line with its newline, its record) in order. A line without a record is logged."""
    if not path.exists():
        return
    with open(path, "rb") as file:
        for line in file:
            try:
                record = parse_json(line)
                if not isinstance(record["step"], int):
                    raise TypeError
            except (ValueError, TypeError, KeyError):
                record = None
                log.warning(f"a line of {path} that is not a record is ignored: {line!r:.60}")
            yield line, record


class WriteStatus:
    """Logs one line when writing a file begins to fail, and one when it works again.

    Call `failed` or `worked` after each attempt.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.is_failing = path, False

    def failed(self, error: BaseException) -> None:
        was_failing, self.is_failing = self.is_failing, True
        if not was_failing:
            log.warning(
                f"{self.path} cannot be written ({reason_of(error)}): training goes on, and it is tried again"
            )

    def worked(self) -> None:
        was_failing, self.is_failing = self.is_failing, False
        if was_failing:
            log.warning(f"{self.path} is written again")


# Called before a file is touched. False: another job or a later generation has the folder; write nothing.
MayWrite = Callable[[], bool]


def always() -> bool:
    return True


class SmallFile:
    """A file that is replaced as a whole. Its latest content is kept in memory until it is written.

    The methods raise no OSError: `status` logs it. They may be called in several threads.
    """

    def __init__(self, path: Path, may_write: MayWrite = always) -> None:
        self.path, self.may_write, self.status = path, may_write, WriteStatus(path)
        self.unwritten: str | bytes | None = None
        self.lock = threading.Lock()
        # The executor starts its thread when it is first used.
        self.background = ThreadPoolExecutor(max_workers=1)

    def write(self, content: str | bytes) -> None:
        """Replace the file and fsync it. If that fails or `may_write()` is False, keep the content."""
        self.unwritten = content
        self.retry()

    def write_in_background(self, content: str | bytes) -> None:
        """Replace the file in a background thread; of several contents that wait, the latest is written."""
        self.unwritten = content
        self.background.submit(self.retry)

    def retry(self) -> None:
        """Try to write the content that is not on disk yet, if there is any."""
        with self.lock:
            content = self.unwritten
            if content is None or not self.may_write():
                return
            try:
                write_atomic(self.path, content, sync="file", before_rename=self.may_write)
            except OSError as error:
                self.status.failed(error)
                return
            if self.unwritten is content:
                self.unwritten = None
            self.status.worked()


class LineFile:
    """A file to which whole lines are appended. Safe for use by several threads. Logs OSError, raises none.

    A line that cannot be written waits in memory, with all later ones, until a write or `retry` succeeds. At
    most `max_pending` lines wait (None: all of them); the oldest are dropped. Each attempt to write first
    calls `prepare`, which may raise OSError, until one call has succeeded.
    """

    def __init__(
        self,
        path: Path,
        *,
        prepare: Callable[[], None] | None = None,
        max_pending: int | None = None,
        may_write: MayWrite = always,
    ) -> None:
        self.path, self.prepare, self.may_write = path, prepare, may_write
        self.status = WriteStatus(path)
        self.pending: deque[bytes] = deque(maxlen=max_pending)
        self.lock = threading.RLock()  # reentrant: if this is log.txt, `status` logs to it during `retry`

    def write(self, line: bytes) -> None:
        """Append a line, which must end with a newline."""
        with self.lock:
            self.pending.append(line)
            self.retry()

    def retry(self, sync: bool = False) -> None:
        """Try to write the lines that wait, and with `sync` make all lines durable."""
        with self.lock:
            if not self.may_write():
                return
            try:
                if self.prepare is not None:
                    self.prepare()
                    self.prepare = None
                # The file is opened each time, since a handle on NFS may become stale.
                with open(self.path, "ab", buffering=0) as file:
                    while self.pending:
                        append(file.fileno(), self.pending[0])
                        self.pending.popleft()
                    if sync or self.status.is_failing:  # the failure may have been one of fsync
                        os.fsync(file.fileno())
            except OSError as error:
                self.status.failed(error)
                return
            self.status.worked()


def append(handle: int, line: bytes) -> None:
    """Write a whole line to a file descriptor. If this raises OSError, no part of the line stays there."""
    size = os.fstat(handle).st_size
    try:
        write_all(functools.partial(os.write, handle), line)
    except OSError:
        os.ftruncate(handle, size)
        raise


class JsonlSink(Sink):
    """Appends each record to metrics.jsonl. Constructing it drops the records of steps to be done again."""

    def __init__(self, run: RunInfo) -> None:
        self.run, self.path = run, run.run_dir / "metrics.jsonl"
        self.file = LineFile(self.path, prepare=self.prepare, may_write=run.may_write)
        self.file.retry()

    def prepare(self) -> None:
        """Truncate the file before its first record past the step from which this generation starts.

        If this is step 0, its records are dropped, too, since they come again. So is a last line that a crash
        has cut short. This needs no room on the disk. Raises OSError.
        """
        kept_bytes, step = 0, self.run.first_step
        for line, record in read_lines(self.path):
            is_past = record is not None and (record["step"] > step or step == 0)
            if is_past or not line.endswith(b"\n"):
                os.truncate(self.path, kept_bytes)
                return
            kept_bytes += len(line)

    def log(self, step: int, values: Values) -> None:
        self.file.write(json.dumps({"step": step, **values}).encode() + b"\n")

    def flush(self) -> None:
        self.file.retry(sync=True)

    def first_waiting(self) -> int | None:
        """Return the step of the first record that could not be written; None if all are in the file."""
        return int(json.loads(self.file.pending[0])["step"]) if self.file.pending else None
