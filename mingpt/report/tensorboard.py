"""TensorBoard: run_dir/tensorboard holds one curve of each metric, however often the run was killed.

Event files are read and appended: a record is its length (8 bytes), a checksum of that (4), an Event of
TensorFlow's format and a checksum of it (4).
"""

import contextlib
import functools
import io
import itertools
import logging
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mingpt.base.files import write_all
from mingpt.report.files import record_key
from mingpt.report.metrics import RunInfo, Values
from mingpt.report.tracker import Destination, EarlierRecords

PREFIX = "events.out.tfevents."
HEADER_BYTES, FOOTER_BYTES = 12, 4
MARK = "generation"  # a scalar and, after a restart, a text: a generation begins at this step
log = logging.getLogger(__name__)


def event_files(folder: Path) -> list[Path]:
    """In the order in which TensorBoard reads them. Raises OSError."""
    return sorted(folder.glob(f"{PREFIX}*"))


def read_events(path: Path) -> Iterator[tuple[int, Any]]:
    """(where its record ends, Event) of each, up to the first that is damaged or cut. Raises OSError."""
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto.event_pb2 import Event

    with open(path, "rb") as file:
        left = os.fstat(file.fileno()).st_size
        while left >= HEADER_BYTES:
            header = file.read(HEADER_BYTES)
            (size,) = struct.unpack("<Q", header[:8])
            left -= HEADER_BYTES + size + FOOTER_BYTES
            if left < 0 or size == 0:
                return  # cut, or the zeros that a power failure leaves
            content = file.read(size)
            file.read(FOOTER_BYTES)
            try:
                event = Event.FromString(content)
            except DecodeError:
                return
            yield file.tell(), event


class EventFile:
    """A new event file. An Event that `write` has returned for outlives this process."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads files by their names: a clock that was set back must not change the order.
        stamps = [path.name.removeprefix(PREFIX).split(".")[0] for path in event_files(folder)]
        stamp = max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])
        self.path = folder / f"{PREFIX}{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0"
        self.handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
        self.buffer = io.BytesIO()
        self.encoder = RecordWriter(self.buffer)
        self.write(Event(file_version="brain.Event:2"))

    def write(self, event: Any) -> None:
        """Append an Event, whole. Raises OSError; then the file ends with the Event before."""
        event.wall_time = time.time()
        self.encoder.write(event.SerializeToString())
        record = self.buffer.getvalue()
        self.buffer.seek(0)
        self.buffer.truncate()
        whole = os.fstat(self.handle).st_size
        try:
            write_all(functools.partial(os.write, self.handle), record)
        except OSError:
            with contextlib.suppress(OSError):  # what is left of it is cut by the next generation
                os.ftruncate(self.handle, whole)
            raise

    def sync(self) -> None:
        """Make it durable. Raises OSError."""
        os.fsync(self.handle)

    def close(self) -> None:
        """Raises OSError."""
        os.close(self.handle)


class TensorBoard(Destination):
    """Scalars under their names in metrics.jsonl, samples as text, the start of each generation as a mark.

    Each generation appends a file. It cuts from the earlier ones what lies behind the step from which it
    goes on, marks that place for a TensorBoard that has read it, and adds the records of metrics.jsonl that
    they lack: a kill may have come before they were written, or the setting was off. A fresh run keeps the
    events of an earlier one in tensorboard-old-<n>.
    """

    package = "tensorboard"

    def __init__(self, run: RunInfo) -> None:
        self.run, self.folder = run, run.run_dir / "tensorboard"
        self.label = f"report.tensorboard ({self.folder})"
        self.file: EventFile | None = None
        self.records: set[tuple[int, bool]] = set()  # in the files, up to the step of the start
        self.texts: set[tuple[int, str]] = set()
        self.marks: set[int] = set()

    def open(self, earlier: EarlierRecords) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        if self.run.is_fresh:
            self.keep_earlier_events()
        first_step = earlier.step + 1 if earlier.step else 0  # what was logged at step 0 comes again
        for path in event_files(self.folder):
            self.cut(path, first_step)
        self.file = EventFile(self.folder)
        self.file.write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))
        self.add_missing(earlier)
        self.records = {key for key in self.records if key[0] == earlier.step}  # no other one can come again

    def keep_earlier_events(self) -> None:
        """Raises OSError."""
        events = (event for path in event_files(self.folder) for _, event in read_events(path))
        if any(event.step and event.HasField("summary") for event in events):
            names = (self.folder.with_name(f"tensorboard-old-{number}") for number in itertools.count(1))
            target = next(path for path in names if not path.exists())
            self.folder.rename(target)
            log.warning("this is a fresh run: the events of an earlier one are kept in %s", target)

    def cut(self, path: Path, first_step: int) -> None:
        """Cut the end of a file: Events from `first_step` on, or of no whole record. Notes what is left.

        The mark at the step before is cut too: another generation begins there. Raises OSError.
        """
        kept_bytes, last_marks = 0, []
        for end, event in read_events(path):
            if event.HasField("session_log"):
                self.forget(event.step)
            is_mark = any(value.tag == MARK for value in event.summary.value)
            if event.HasField("summary") and event.step >= first_step:
                continue
            if is_mark and event.step == first_step - 1:
                last_marks.append(end)
                continue
            kept_bytes = end
            self.note(event, is_mark)
        if any(end < kept_bytes for end in last_marks):
            self.marks.add(first_step - 1)
        if kept_bytes < path.stat().st_size:
            os.truncate(path, kept_bytes)

    def forget(self, step: int) -> None:
        """Drop what was noted from `step` on, as TensorBoard does where a generation begins."""
        self.records = {key for key in self.records if key[0] < step}
        self.texts = {key for key in self.texts if key[0] < step}
        self.marks = {mark for mark in self.marks if mark < step}

    def note(self, event: Any, is_mark: bool) -> None:
        values = event.summary.value
        if is_mark:
            self.marks.add(event.step)
        elif any(value.HasField("tensor") for value in values):
            self.texts |= {(event.step, value.tag) for value in values}
        elif values:
            self.records.add((event.step, any(value.tag == "val/loss" for value in values)))

    def add_missing(self, earlier: EarlierRecords) -> None:
        """Write the records of earlier generations, and the marks, that are in no file."""
        marks: dict[int, list[str]] = {}
        numbers = {}
        for number, (step, how) in enumerate(self.run.starts, 1):
            for behind in [one for one in marks if one > step]:
                del marks[behind]  # the run went back further
            marks.setdefault(step, []).append(f"generation {number}: {how}" if how else "")
            numbers[step] = number
        waiting = [step for step in sorted(marks) if step not in self.marks and step <= earlier.step]
        for step, values in earlier:
            while waiting and waiting[0] < step:
                self.write_mark(waiting[0], numbers[waiting[0]], marks[waiting[0]])
                waiting.pop(0)
            self.log(step, values)
            self.records.add(record_key({"step": step, **values}))
        for step in waiting:
            self.write_mark(step, numbers[step], marks[step])

    def write_mark(self, step: int, number: int, reasons: list[str]) -> None:
        reason = "\n\n".join(filter(None, reasons))
        texts = [text_value("restart", reason)] if reason else []
        self.write(step, [scalar(MARK, number), *texts])

    def log(self, step: int, values: Values) -> None:
        key = record_key({"step": step, **values})
        if values and key not in self.records:
            self.write(step, [scalar(name, value) for name, value in values.items()])

    def log_text(self, step: int, name: str, text: str) -> None:
        value = text_value(name, fenced(text))
        if (step, value.tag) not in self.texts:
            self.write(step, [value])

    def write(self, step: int, values: list[Any]) -> None:
        """One Event for all values of a record: a file has all of them, or none."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        assert self.file is not None
        self.file.write(Event(step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        if self.file is not None:
            self.file.sync()

    def close(self) -> None:
        if self.file is not None:
            self.file.sync()
            self.file.close()


def scalar(name: str, value: float) -> Any:
    """A Summary.Value."""
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary.Value(tag=name, simple_value=value)


def text_value(name: str, text: str) -> Any:
    """A Summary.Value that TensorBoard shows as Markdown."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    tensor = TensorProto(dtype="DT_STRING", string_val=[text.encode(errors="replace")])
    tensor.tensor_shape.CopyFrom(TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]))
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    metadata = SummaryMetadata(plugin_data=plugin)
    return Summary.Value(tag=f"{name}/text_summary", metadata=metadata, tensor=tensor)


def fenced(text: str) -> str:
    """Markdown that shows the text as it is."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}\n{text}\n{fence}"
