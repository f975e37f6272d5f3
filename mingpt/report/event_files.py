"""Event files of TensorBoard: records of TensorFlow's format, each with an Event, read and appended.

A record is its length (8 bytes), a checksum of that (4), the Event and a checksum of it (4).
"""

import contextlib
import io
import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mingpt.report.files import write_all

PREFIX = "events.out.tfevents."
HEADER_BYTES, FOOTER_BYTES = 12, 4


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
            write_all(self.handle, record)
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
