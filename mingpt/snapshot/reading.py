"""Reading a range of a file, in a folder or at a URL, and telling failures to read from wrong content."""

import errno
import logging
import os
import stat
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from mingpt.errors import CorruptSnapshot, UnreadableSnapshot

PIECE_BYTES = 16 << 20  # asked for at once from a URL: drivers give a request a few minutes
T = TypeVar("T")
log = logging.getLogger(__name__)


def with_retries(work: Callable[[], T], what: str, retries_s: tuple[float, ...]) -> T:
    """The result of `work`, which reads `what`, tried again after each of `retries_s` seconds.

    Raises CorruptSnapshot for what is missing or no file, UnreadableSnapshot if reading fails to the end.
    """
    for pause_s in (*retries_s, None):
        try:
            return work()
        except (CorruptSnapshot, UnreadableSnapshot):
            raise
        except FileNotFoundError:
            raise CorruptSnapshot(f"{what} is missing") from None
        except Exception as error:  # each driver raises exceptions of its own
            if isinstance(error, IsADirectoryError) or getattr(error, "errno", None) == errno.ELOOP:
                raise CorruptSnapshot(f"{what} is not a file") from None
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            if pause_s is None:
                raise UnreadableSnapshot(f"{what} cannot be read: {str(reason)[:300]}") from None
            log.info("%s cannot be read (%s); trying again", what, str(reason)[:300])
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


class SourceFile:
    """A file in a folder or at a URL, called `what` in messages. Raises as `with_retries` does.

    In a folder, all that is read comes from one version of the file: UnreadableSnapshot if it has changed.
    """

    def __init__(self, files: Any, path: str, what: str, retries_s: tuple[float, ...]) -> None:
        self.files, self.path, self.what, self.retries_s = files, path, what, retries_s
        self.version: tuple[int, int] | None = None  # size and time of the file that was looked at first

    def size(self) -> int:
        """In bytes."""
        size, version = with_retries(
            lambda: size_and_version(self.files, self.path), self.what, self.retries_s
        )
        self.check_version(version)
        return size

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`."""
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return bytes(content)

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `begin` on; never reads more."""
        for at in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[at : at + PIECE_BYTES]
            self.read_piece(begin + at, piece)

    def read_piece(self, begin: int, piece: memoryview) -> None:
        version = with_retries(
            lambda: read_range(self.files, self.path, begin, piece), self.what, self.retries_s
        )
        self.check_version(version)

    def check_version(self, version: tuple[int, int] | None) -> None:
        self.version = self.version or version
        if version != self.version:
            raise UnreadableSnapshot(f"{self.what} has changed while it was read")


class ContentFile(SourceFile):
    """A file whose bytes are in memory."""

    def __init__(self, content: bytes | memoryview, what: str = "the file") -> None:
        super().__init__(None, "", what, ())
        self.content = memoryview(content)

    def size(self) -> int:
        return len(self.content)

    def read_piece(self, begin: int, piece: memoryview) -> None:
        piece[:] = self.content[begin : begin + len(piece)]


def file_size(files: Any, path: str) -> int:
    """In bytes. Raises as `size_and_version` does."""
    return size_and_version(files, path)[0]


def size_and_version(files: Any, path: str) -> tuple[int, tuple[int, int] | None]:
    """In bytes, and in a folder what changes with the file.

    Raises IsADirectoryError for what is not a regular file, and whatever the driver raises.
    """
    if isinstance(files, LocalFileSystem):
        version = version_of(os.stat(path), path)
        return version[0], version
    info = files.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(path)
    return int(info["size"]), None


def version_of(status: os.stat_result, path: str) -> tuple[int, int]:
    """Size and time of change. Raises IsADirectoryError for what is not a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise IsADirectoryError(path)
    return status.st_size, status.st_mtime_ns


def read_range(files: Any, path: str, begin: int, buffer: memoryview) -> tuple[int, int] | None:
    """Fill `buffer` with the bytes from `begin` on; returns the version as `size_and_version` does.

    Raises OSError if there are fewer, and what the driver raises.
    """
    version, count = None, 0
    if isinstance(files, LocalFileSystem):
        # Whatever has taken a file's place since its size was asked for, this does not wait for it.
        with open(path, "rb", buffering=0, opener=open_without_waiting) as file:
            version_of(os.fstat(file.fileno()), path)  # a device is not read
            file.seek(begin)
            read = 1
            while count < len(buffer) and read:
                read = file.readinto(buffer[count:])
                count += read
            version = version_of(os.fstat(file.fileno()), path)
    else:
        content = files.cat_file(path, start=begin, end=begin + len(buffer)) if buffer else b""
        count = len(content)
        buffer[: min(count, len(buffer))] = content[: len(buffer)]
    if count != len(buffer):
        raise OSError(errno.EIO, f"{count} bytes came instead of {len(buffer)}")
    return version


def open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
