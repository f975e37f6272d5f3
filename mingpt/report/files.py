"""The files of a run. What cannot be written is said once, kept, and written when that works again.

metrics.jsonl has a line per record, written at once, each with its `step`; one curve across restarts.
"""

import errno
import functools
import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mingpt.base.files import atomic_file, parse_json, reason_of, write_all, write_atomic
from mingpt.report.metrics import RunInfo, Sink, Values

log = logging.getLogger(__name__)


def read_records(path: Path, n_bytes: int | None = None) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl, one at a time; a line cut short by a crash is left out.

    With `n_bytes`, only those that begin in so many first bytes of the file.
    """
    for _, record in read_lines(path, n_bytes):
        if record is not None:
            yield record


def read_lines(path: Path, n_bytes: int | None = None) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """(line, its record) in their order, one at a time; None for a line that is not a record."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the `with` below
    except FileNotFoundError:
        return
    with file:
        begin = 0
        for line in file:
            if n_bytes is not None and begin >= n_bytes:
                return
            begin += len(line)
            record = None
            try:
                values = parse_json(line)
                if isinstance(values["step"], int):
                    record = values
            except (ValueError, TypeError, KeyError):
                pass  # said below
            if record is None:
                log.warning("a line of %s that is not a record is ignored: %.60r", path, line)
            yield line, record


class WriteStatus:
    """Says once that a file cannot be written, and once that it can again."""

    def __init__(self, path: Path, report: Callable[[str], None] | None = None) -> None:
        self.path, self.is_failing, self.reason = path, False, ""
        self.report = report or (lambda sentence: log.warning("%s", sentence))

    def failed(self, error: BaseException) -> None:
        was_failing, self.is_failing, self.reason = self.is_failing, True, reason_of(error)
        if not was_failing:
            self.report(
                f"{self.path} cannot be written ({self.reason}): training goes on, and it is tried again"
            )

    def worked(self) -> None:
        was_failing, self.is_failing = self.is_failing, False
        if was_failing:
            self.report(f"{self.path} is written again")


MayWrite = Callable[[], bool]  # asked before a file is touched: the folder may be another job's by now


def always() -> bool:
    return True


class SmallFile:
    """A file that is written whole; the latest content is kept until it is on disk."""

    def __init__(self, path: Path, may_write: MayWrite = always) -> None:
        self.path, self.may_write, self.status = path, may_write, WriteStatus(path)
        self.unwritten: str | bytes | None = None
        self.lock = threading.Lock()
        self.wanted = threading.Event()
        self.thread: threading.Thread | None = None

    def write(self, content: str | bytes) -> None:
        """Replace the file; on return it is durable, unless a line says that it cannot be written."""
        self.unwritten = content
        self.retry()

    def write_in_background(self, content: str | bytes) -> None:
        """Replace the file soon; of contents that come faster than they are written, the latest is."""
        self.unwritten = content
        if self.thread is None:
            self.thread = threading.Thread(target=self._write_when_wanted, daemon=True)
            self.thread.start()
        self.wanted.set()

    def retry(self) -> None:
        """Write what is not on disk yet."""
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

    def _write_when_wanted(self) -> None:
        while True:
            self.wanted.wait()
            self.wanted.clear()
            self.retry()


class LineFile:
    """A file that whole lines are appended to. Safe for use by several threads.

    A line that cannot be written waits in memory, with all later ones, until there is room. At most
    `max_pending` lines wait (None: all of them); the oldest are dropped. `before` is done before a line is
    written, and tried again until it works: whoever opens the file has something to put right in it.
    """

    def __init__(
        self,
        path: Path,
        *,
        before: Callable[[], None] | None = None,
        max_pending: int | None = None,
        may_write: MayWrite = always,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.path, self.status = path, WriteStatus(path, report)
        self.before = [before] if before else []  # each is dropped once it has worked
        self.may_write = may_write
        self.pending: deque[bytes] = deque(maxlen=max_pending)
        self.handle: int | None = None
        self.is_unsynced = False  # the last sync has failed
        self.torn_at: int | None = None  # size of the whole lines before one that was written in part
        self.lock = threading.RLock()

    def write(self, line: bytes) -> None:
        """Append a line, which ends with a newline."""
        with self.lock:
            self.pending.append(line)
            self.retry()

    def reopen_after(self, work: Callable[[], None]) -> None:
        """Close the file and do `work` before the next line, now if that is possible."""
        with self.lock:
            self.close()
            self.before.append(work)
            self.retry()

    def retry(self, sync: bool = False) -> None:
        """Write the lines that wait, and with `sync` make all of them durable."""
        with self.lock:
            if not self.may_write():
                return
            try:
                self._put_right()
                while self.pending:
                    self._append(self.pending[0])
                    self.pending.popleft()
                if self.handle is not None and (sync or self.is_unsynced):
                    self.is_unsynced = True
                    os.fsync(self.handle)
                    self.is_unsynced = False
            except OSError as error:
                self.status.failed(error)
                if error.errno == errno.ESTALE:
                    self.close()
                return
            self.status.worked()

    def _put_right(self) -> None:
        """What has to be done before the next line. Raises OSError."""
        while self.before:
            self.before[0]()
            del self.before[0]
        if self.handle is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self.handle = os.open(self.path, flags, 0o666)
        if self.torn_at is not None:
            os.ftruncate(self.handle, self.torn_at)
            self.torn_at = None

    def _append(self, line: bytes) -> None:
        """Raises OSError; then nothing of the line is in the file, or it is removed before the next one."""
        assert self.handle is not None
        whole = os.fstat(self.handle).st_size
        written = 0
        while written < len(line):
            try:
                written += os.write(self.handle, line[written:])
            except OSError:
                if written:
                    self.torn_at = whole
                    self._remove_torn_line()
                raise

    def _remove_torn_line(self) -> None:
        try:
            self._put_right()
        except OSError:
            log.debug("%s ends with a part of a line", self.path)  # it is removed before the next one

    def close(self) -> None:
        """Let the file go; the next line opens it again."""
        with self.lock:
            handle, self.handle = self.handle, None
            if handle is not None:
                try:
                    os.close(handle)
                except OSError as error:  # NFS reports here what it could not write
                    self.status.failed(error)


class JsonlSink(Sink):
    """A fresh run keeps the records of an earlier one as metrics-old-<n>.jsonl."""

    def __init__(self, run: RunInfo) -> None:
        self.run, self.path = run, run.run_dir / "metrics.jsonl"
        before = self.keep_earlier_records if run.is_fresh else None
        self.file = LineFile(self.path, before=before, may_write=run.may_write)
        self.file.retry()

    def keep_earlier_records(self) -> None:
        """Raises OSError."""
        if any(record["step"] for record in read_records(self.path)):
            names = (self.path.with_name(f"metrics-old-{number}.jsonl") for number in itertools.count(1))
            target = next(path for path in names if not path.exists())
            self.path.rename(target)
            log.warning("this is a fresh run: the records of an earlier one are kept in %s", target)

    def rewind(self, step: int) -> None:
        self.file.reopen_after(lambda: self.drop_past(step))

    def drop_past(self, step: int) -> None:
        """Drop the records past `step`, and all at 0: they come again. Raises OSError.

        That is a truncation, which needs no room on the disk, unless dropped lines lie between others. A
        record that comes late, as one that was being written when storage hung, is put in its place.
        """
        kept_bytes, is_dropping, needs_rewrite, last = 0, False, False, (-1, False)
        for line, record in read_lines(self.path):
            if record is None or record["step"] > step or step == 0:
                is_dropping = True
                continue
            key = record_key(record)
            needs_rewrite = needs_rewrite or is_dropping or not line.endswith(b"\n") or key <= last
            kept_bytes, last = kept_bytes + len(line), key
        if needs_rewrite:
            self.rewrite(step)
        elif is_dropping:
            os.truncate(self.path, kept_bytes)

    def rewrite(self, step: int) -> None:
        """Replace the file by its records up to `step`, each once and in order. Raises OSError."""
        kept = {
            record_key(record): line.rstrip(b"\n") + b"\n"
            for line, record in read_lines(self.path)
            if record is not None and record["step"] <= step
        }
        with atomic_file(self.path, sync="file") as file:
            for key in sorted(kept):
                write_all(functools.partial(os.write, file.fileno()), kept[key])

    def log(self, step: int, values: Values) -> None:
        self.file.write(encode({"step": step, **values}))

    def flush(self) -> None:
        self.file.retry(sync=True)

    def close(self) -> None:
        self.file.retry(sync=True)


def encode(record: dict[str, Any]) -> bytes:
    return json.dumps(record).encode() + b"\n"


def record_key(record: dict[str, Any]) -> tuple[int, bool]:
    """What a run has at most one record of."""
    return record["step"], "val/loss" in record
