"""Write a run's report files. If a write fails, the run goes on, and the write is tried again later.

metrics.jsonl has one JSON object per record, with the record's `step`; a record is written as soon as it is
made. If a step is done again after a restart, the file keeps only the step's last records.
"""

import contextlib
import functools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mingpt.base.files import parse_json, reason_of, write_all, write_atomic
from mingpt.report.metrics import RunStart, Sink, Values

# Called before a file is changed. If it returns False, this generation (the workers between two restarts) no
# longer holds the claim to the folder, and nothing may be written.
MayWrite = Callable[[], bool]
MAX_LINE_BYTES = 1 << 20  # of metrics.jsonl; a record has a few hundred
log = logging.getLogger(__name__)


class ReportFile:
    """A file that is replaced as a whole, or appended to. Several threads may use it. Raises no OSError.

    A write that fails is kept, and tried again before the next write, unless `replace` drops it. One log line
    says when writing begins to fail, and another line when writing works again. While `may_write` returns
    False, nothing is written.
    """

    def __init__(self, path: Path, may_write: MayWrite = lambda: True) -> None:
        self.path, self.may_write, self.is_failing = path, may_write, False
        self.waiting = deque[Callable[[], None]]()
        # Reentrant, because `report` appends a line to log.txt, which may be this file.
        self.lock = threading.RLock()

    def replace(self, content: str | bytes) -> None:
        """Replace the file by `content`, which is fsynced first; kept earlier writes are dropped."""
        with self.lock:
            self.waiting.clear()
            self.put(lambda: write_atomic(self.path, content, sync="file", before_rename=self.may_write))

    def append(self, line: bytes, sync: bool = False) -> None:
        """Append `line`, one whole line with its newline, or b""; with `sync`, make the file durable."""
        self.put(lambda: append(self.path, line, sync))

    def put(self, write: Callable[[], None]) -> None:
        """Add `write` to the kept writes, and do them as `retry` does."""
        with self.lock:
            self.waiting.append(write)
            self.retry()

    def retry(self) -> None:
        """Do the kept writes in order, up to the first that fails; none if `may_write` returns False.

        Writes that have been done are no longer kept.
        """
        with self.lock:
            if not self.may_write():
                return
            try:
                while self.waiting:
                    self.waiting[0]()
                    self.waiting.popleft()
            except OSError as error:
                self.report(error)
                return
            self.report(None)

    def report(self, error: BaseException | None) -> None:
        """Note that writing failed with `error`, or worked if `error` is None. Log a line at each change."""
        was_failing, self.is_failing = self.is_failing, error is not None
        if error is not None and not was_failing:
            log.warning(
                f"{self.path} cannot be written ({reason_of(error)}): training goes on, and it is tried again"
            )
        elif error is None and was_failing:
            log.warning(f"{self.path} is written again")


def append(path: Path, line: bytes, sync: bool) -> None:
    """Append a line to the file at `path`; with `sync`, make the file durable.

    Raises OSError on a failure. If only a part of the line could be written, the part is removed if possible.
    """
    # The file is opened each time, because a handle on NFS may become stale.
    with open(path, "ab", buffering=0) as file:
        handle, size = file.fileno(), os.fstat(file.fileno()).st_size
        try:
            write_all(functools.partial(os.write, handle), line)
        except OSError:
            os.ftruncate(handle, size)
            raise
        if sync:
            os.fsync(handle)


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the metrics.jsonl at `path`; none if the file is missing.

    A line that is not a record is logged and skipped. Raises OSError if the file cannot be read.
    """
    for line, record in read_lines(path):
        if record is None:
            log.warning(f"a line of {path} that is not a record is ignored: {line!r:.60}")
        else:
            yield record


def read_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Yield (line with its newline, the record in the line) in order; nothing if the file is missing.

    The record is None if the line is not a record. The last line may lack a newline. A line of more than
    MAX_LINE_BYTES comes in pieces. Raises OSError if the file cannot be read.
    """
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in iter(functools.partial(file.readline, MAX_LINE_BYTES), b""):
            try:
                record = parse_json(line)
                numbers = [value for value in record.values() if isinstance(value, int)]
                if not isinstance(record["step"], int) or max(map(abs, numbers)) >= 2**63:
                    raise TypeError
            except (ValueError, TypeError, KeyError, AttributeError):
                record = None
            yield line, record


class JsonlSink(Sink):
    """Appends each record to metrics.jsonl.

    Constructing a JsonlSink drops the records of steps that this generation does again.
    """

    def __init__(self, run: RunStart) -> None:
        self.run, self.last = run, dict[str, dict[str, Any]]()  # the last record of each kind
        self.first_waiting = run.step + 1  # step of the first record that is not written yet
        self.file = ReportFile(run.run_dir / "metrics.jsonl", run.may_write)
        self.file.put(self.drop_records)

    def drop_records(self) -> None:
        """Truncate the file before the first record of a step after `run.step`.

        If `run.step` is 0, all records are dropped, because a record of step 0 may be written again. A line
        that is incomplete or longer than MAX_LINE_BYTES is dropped, too, with all lines after it. Each kept
        record is passed to `remember`, which updates `last`. Raises OSError if the file cannot be read or
        truncated.
        """
        kept_bytes, step = 0, self.run.step
        for line, record in read_lines(self.file.path):
            is_past = record is not None and (record["step"] > step or step == 0)
            if is_past or not line.endswith(b"\n"):
                os.truncate(self.file.path, kept_bytes)
                return
            kept_bytes += len(line)
            if record is not None:
                self.remember(record)

    def remember(self, record: dict[str, Any]) -> None:
        kinds = {"val/loss": "val", "skipped/first_window": "skipped"}
        kind = next((kind for name, kind in kinds.items() if name in record), "train")
        if record["step"] >= self.last.get(kind, record)["step"]:
            self.last[kind] = record

    def log(self, step: int, values: Values) -> None:
        if not self.file.waiting:
            self.first_waiting = step
        record = {"step": step, **values}
        self.remember(record)
        self.file.append(json.dumps(record).encode() + b"\n")

    def flush(self) -> None:
        """Make all records so far durable, if possible."""
        self.file.append(b"", sync=True)
