"""The safetensors format, read strictly, from ranges of a file in a folder or at a URL.

The format is 8 bytes with the header's length, the header as JSON, the tensors. `TensorFile` reads the
header, and later single tensors or rows of them. The header is checked against the file's size before
anything is allocated. No pickle is read, and nothing is executed. A failure to read is distinguished from
wrong content. https://huggingface.co/docs/safetensors
"""

import errno
import functools
import logging
import math
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import pydantic
import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot
from mingpt.base.files import PIECE_BYTES, BadJson, Count, DriverError, check_json, reason_of, retry
from mingpt.snapshot.layout import DTYPES, memory_of
from mingpt.snapshot.manifest import parse_object

T = TypeVar("T")
LENGTH_BYTES = 8
MAX_HEADER = 4 << 20  # bytes; gpt2-xl and its optimizer take a tenth of it
MAX_DIMENSIONS = 8
log = logging.getLogger(__name__)


def with_retries(work: Callable[[], T], what: str, retries_s: tuple[float, ...]) -> T:
    """The result of `work`, which reads `what` and is tried again after each of `retries_s` seconds.

    Raises CorruptSnapshot if `what` is missing or no file, UnreadableSnapshot if the last attempt fails.
    """

    def on_failure(error: Exception) -> None:
        failure = failure_of(error, what)
        if failure is error or isinstance(failure, CorruptSnapshot):
            raise error  # it would fail again
        log.info(f"{what} cannot be read ({reason_of(error)}); trying again")

    try:
        return retry(work, retries_s, on_failure)
    except DriverError as error:
        raise failure_of(error, what) from None


def failure_of(error: Exception, what: str) -> CorruptSnapshot | UnreadableSnapshot:
    """Return CorruptSnapshot if `what` is missing or no file, else UnreadableSnapshot, or `error` if one."""
    if isinstance(error, (CorruptSnapshot, UnreadableSnapshot)):
        return error
    if isinstance(error, FileNotFoundError):
        return CorruptSnapshot(f"{what} is missing")
    if isinstance(error, IsADirectoryError) or getattr(error, "errno", None) == errno.ELOOP:
        return CorruptSnapshot(f"{what} is not a file")
    return UnreadableSnapshot(f"{what} cannot be read: {reason_of(error)}")


class SourceFile:
    """Reads a file of the fsspec file system `files`, as `with_retries` does; messages call it `what`."""

    def __init__(self, files: Any, path: str, what: str, retries_s: tuple[float, ...]) -> None:
        self.files, self.path, self.what, self.retries_s = files, path, what, retries_s

    def size(self) -> int:
        """The size in bytes. Call it before reading: it raises CorruptSnapshot unless the file is regular."""
        return with_retries(lambda: size_of(self.files, self.path), self.what, self.retries_s)

    def read(self, begin: int, end: int) -> bytes:
        """The bytes from `begin` to before `end`."""
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return bytes(content)

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `begin` on, and read no more."""
        for at in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[at : at + PIECE_BYTES]
            work = functools.partial(read_range, self.files, self.path, begin + at, piece)
            with_retries(work, self.what, self.retries_s)


def size_of(files: Any, path: str) -> int:
    """The size of a file in bytes. Raises IsADirectoryError unless it is regular, and a driver's errors."""
    if isinstance(files, LocalFileSystem):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise IsADirectoryError(path)
        return status.st_size
    info = files.info(path)
    if info["type"] == "directory":
        raise IsADirectoryError(path)
    return int(info["size"])


def read_range(files: Any, path: str, begin: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes from `begin` on.

    Raises OSError if there are fewer, and a driver's errors.
    """
    if isinstance(files, LocalFileSystem):
        with open(path, "rb") as file:
            file.seek(begin)
            count = file.readinto(buffer)
    else:
        content = files.cat_file(path, start=begin, end=begin + len(buffer)) if buffer else b""
        count = len(content)
        buffer[: min(count, len(buffer))] = content[: len(buffer)]
    if count != len(buffer):
        raise OSError(errno.EIO, f"{count} bytes came instead of {len(buffer)}")


@dataclass(frozen=True)
class TensorEntry:
    """The type, shape and place of a tensor in its file, as offsets from the file's start."""

    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]
    begin: int
    end: int


class EntryFields(pydantic.BaseModel):
    """The fields of a tensor's entry in the header."""

    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    dtype: Literal[tuple(DTYPES)]  # type: ignore[valid-type]
    shape: list[Count] = pydantic.Field(max_length=MAX_DIMENSIONS)
    data_offsets: list[Count] = pydantic.Field(min_length=2, max_length=2)


Entries = Mapping[str, TensorEntry]
# A function that raises CorruptSnapshot or UnreadableSnapshot if a snapshot with this manifest and these
# tensors must not be used.
Check = Callable[[dict[str, Any], Entries], None]


def accept_all(manifest: dict[str, Any], entries: Entries) -> None:
    """The check of a reader that accepts any tensors."""


class TensorFile:
    """A safetensors file, whose header is read and checked at once, and whose tensors are read on request.

    Raises CorruptSnapshot if the header is wrong or the size is not `expected_size` (None: any), and
    UnreadableSnapshot if reading fails. Numbers and checksums are not checked.
    """

    def __init__(self, file: SourceFile, expected_size: int | None = None) -> None:
        self.file, self.size = file, file.size()
        if expected_size not in (None, self.size):
            raise CorruptSnapshot(f"{file.what} has {self.size:,} bytes instead of {expected_size:,}")
        if self.size < LENGTH_BYTES:
            raise CorruptSnapshot(f"{file.what} has {self.size} bytes and no header")
        length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
        if length > min(MAX_HEADER, self.size - LENGTH_BYTES):
            raise CorruptSnapshot(f"the header of {file.what} cannot have {length:,} bytes")
        self.entries = parse_header(file.read(LENGTH_BYTES, LENGTH_BYTES + length), self.size, file.what)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> Tensor:
        """A tensor, or its rows `begin` to before `end` (of dimension 0), in new memory. KeyError if none."""
        entry = self.entries[name]
        dtype, shape, row_bytes = DTYPES[entry.dtype], entry.shape, 0
        if shape:
            stop = shape[0] if end is None else end
            assert 0 <= begin <= stop <= shape[0], f"{name} has no rows {begin} to {stop}"
            row_bytes = (entry.end - entry.begin) // max(1, shape[0])
            shape = (stop - begin, *shape[1:])
        tensor = torch.empty(shape, dtype=dtype)
        self.file.read_into(entry.begin + begin * row_bytes, memory_of(tensor.view(-1).view(torch.uint8)))
        return tensor


def parse_header(header: bytes, file_size: int, what: str) -> dict[str, TensorEntry]:
    """The entries in a header, by name. Raises CorruptSnapshot unless they fill the file without gaps."""
    parsed = parse_object(header, f"the header of {what}")
    parsed.pop("__metadata__", None)
    start = LENGTH_BYTES + len(header)
    entries = {name: parse_entry(name, value, start) for name, value in parsed.items()}
    position = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise wrong(name, "its bytes do not begin where those before it end")
        position = entry.end
    if position != file_size:
        raise CorruptSnapshot(f"the tensors of {what} end at byte {position:,} of {file_size:,}")
    return entries


def parse_entry(name: str, value: Any, start: int) -> TensorEntry:
    """The entry of a tensor; the tensors' bytes begin at `start` in the file. Raises CorruptSnapshot."""
    if not name or len(name) > 500 or any(mark in name for mark in "/\\\0"):
        raise wrong(name, "this is no name for a tensor")
    try:
        check_json(value, EntryFields)
    except BadJson as error:
        raise wrong(name, str(error)) from None
    dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise wrong(name, "its shape does not fit its data_offsets")
    return TensorEntry(dtype, tuple(shape), start + begin, start + end)


def wrong(name: str, reason: str) -> CorruptSnapshot:
    return CorruptSnapshot(f"its tensor {name[:100]!r}: {reason}")


def check_finite(name: str, numbers: Tensor) -> None:
    """Raises CorruptSnapshot if a tensor, or a piece of one, holds NaN or an infinite number."""
    if numbers.is_floating_point() and numbers.numel():
        low, high = numbers.aminmax()  # NaN if any element is
        if not math.isfinite(low) or not math.isfinite(high):
            raise wrong(name, "it holds numbers that are not finite")
