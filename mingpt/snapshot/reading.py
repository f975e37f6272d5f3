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

T = TypeVar("T")
log = logging.getLogger(__name__)


def with_retries(work: Callable[[], T], what: str, retries_s: tuple[float, ...]) -> T:
    """The result of `work`, which reads `what`, tried again after each of `retries_s` seconds.

    Raises CorruptSnapshot for what is missing or no file, UnreadableSnapshot if reading fails to the end.
    """
    for pause_s in (*retries_s, None):
        try:
            return work()
        except CorruptSnapshot:
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
    """A file in a folder or at a URL, called `what` in messages. Raises as `with_retries` does."""

    def __init__(self, files: Any, path: str, what: str, retries_s: tuple[float, ...]) -> None:
        self.files, self.path, self.what, self.retries_s = files, path, what, retries_s

    def size(self) -> int:
        """In bytes."""
        return with_retries(lambda: file_size(self.files, self.path), self.what, self.retries_s)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`."""
        return with_retries(lambda: read_range(self.files, self.path, begin, end), self.what, self.retries_s)


def file_size(files: Any, path: str) -> int:
    """In bytes. Raises IsADirectoryError for what is not a regular file, and whatever the driver raises."""
    if isinstance(files, LocalFileSystem):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(path)
        return status.st_size
    info = files.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(path)
    return int(info["size"])


def read_range(files: Any, path: str, begin: int, end: int) -> bytes:
    """The bytes `begin` to `end - 1`. Raises OSError if there are fewer, and what the driver raises."""
    if isinstance(files, LocalFileSystem):
        # Whatever has taken a file's place since its size was asked for, this does not wait for it.
        with open(path, "rb", opener=open_without_waiting) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError(path)
            file.seek(begin)
            content = file.read(end - begin)
    else:
        content = bytes(files.cat_file(path, start=begin, end=end))
    if len(content) != end - begin:
        raise OSError(errno.EIO, f"{len(content)} bytes came instead of {end - begin}")
    return content


def open_without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
