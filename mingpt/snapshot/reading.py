"""Read files in the safetensors format strictly, range by range, in a folder or at a URL.

A file has 8 bytes with the header's length, the header as JSON, then the tensors. `TensorFile` reads and
checks the header before memory for a tensor is allocated, and later reads single tensors. The header must be
the one that `lay_out` writes for the same names, types and shapes, and must describe all bytes of the file.
No pickle is read, and nothing is executed. A missing file or a wrong header raises CorruptSnapshot, and a
failure to read raises UnreadableSnapshot.
https://huggingface.co/docs/safetensors
"""

import errno
import functools
import logging
import math
import os
import stat
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot
from mingpt.base.files import PIECE_BYTES, DriverError, reason_of, retry
from mingpt.snapshot.layout import DTYPES, LENGTH_BYTES, MAX_HEADER, TensorSpec, lay_out, memory_of
from mingpt.snapshot.manifest import Manifest, parse_object

T = TypeVar("T")
log = logging.getLogger(__name__)


def with_retries(work: Callable[[], T], what: str, retries_s: tuple[float, ...]) -> T:
    """Return the result of `work`. If `work` fails, call it again after each pause of `retries_s` (seconds).

    `work` reads a file or folder, which messages call `what`. If `work` raises FileNotFoundError,
    IsADirectoryError or an error with the errno ELOOP, CorruptSnapshot is raised without another attempt. If
    `work` itself raises CorruptSnapshot or UnreadableSnapshot, that error is raised without another attempt.
    If the last attempt fails with any other error, UnreadableSnapshot is raised.
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
    """Return the error to raise instead of `error`, which was raised while the file `what` was read.

    Returns a CorruptSnapshot for FileNotFoundError, IsADirectoryError and the errno ELOOP (a loop of links),
    else an UnreadableSnapshot. A CorruptSnapshot or an UnreadableSnapshot is returned as it is.
    """
    if isinstance(error, (CorruptSnapshot, UnreadableSnapshot)):
        return error
    if isinstance(error, FileNotFoundError):
        return CorruptSnapshot(f"{what} is missing")
    if isinstance(error, IsADirectoryError) or getattr(error, "errno", None) == errno.ELOOP:
        return CorruptSnapshot(f"{what} is not a file")
    return UnreadableSnapshot(f"{what} cannot be read: {reason_of(error)}")


class SourceFile:
    """Reads the file at `path` in the fsspec file system `files`; messages call the file `what`.

    For the pauses `retries_s` (seconds), and for the errors of all methods, see `with_retries`.
    """

    def __init__(self, files: Any, path: str, what: str, retries_s: tuple[float, ...]) -> None:
        self.files, self.path, self.what, self.retries_s = files, path, what, retries_s

    def size(self) -> int:
        """Return the file's size in bytes. Call this before `read`: opening a pipe, for example, would block.

        Raises CorruptSnapshot if the file is missing or is a folder, or on a local disk anything else that is
        not a regular file. Raises UnreadableSnapshot if the size cannot be read.
        """
        return with_retries(lambda: size_of(self.files, self.path), self.what, self.retries_s)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from offset `begin` up to `end`, which is not included."""
        content = bytearray(end - begin)
        self.read_into(begin, memoryview(content))
        return bytes(content)

    def read_into(self, begin: int, buffer: memoryview) -> None:
        """Fill `buffer` with the file's bytes from offset `begin` on, at most PIECE_BYTES per request."""
        for at in range(0, len(buffer), PIECE_BYTES):
            piece = buffer[at : at + PIECE_BYTES]
            work = functools.partial(read_range, self.files, self.path, begin + at, piece)
            with_retries(work, self.what, self.retries_s)


def size_of(files: Any, path: str) -> int:
    """Return the size, in bytes, of the file at `path` in the fsspec file system `files`.

    Raises IsADirectoryError if `path` is a folder, or on a local disk anything else that is not a regular
    file. If the size cannot be read, raises OSError, TypeError or an error of fsspec's driver.
    """
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
    """Fill `buffer` with bytes, from offset `begin` on, of the file at `path` in the file system `files`.

    Raises OSError or an error of fsspec's driver if the file cannot be read, or ends before `buffer` is full.
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


Entries = Mapping[str, TensorSpec]  # the type and shape of each tensor of a snapshot, by name
# Takes a snapshot's manifest, tensors and tokenizer's bytes (None: it has no tokenizer). Raises
# CorruptSnapshot, UnreadableSnapshot or UserError if the snapshot must not be used.
Check = Callable[[Manifest, Entries, bytes | None], None]


def accept_all(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
    """Accept every snapshot: the `check` for readers that take any manifest and any tensors."""


class StoredFile:
    """A file of a snapshot. The constructor checks that the file exists and has `expected_size` bytes.

    If `expected_size` is None, the file may have any size. The constructor raises CorruptSnapshot if the
    check fails, and UnreadableSnapshot if the size cannot be read.
    """

    def __init__(self, file: SourceFile, expected_size: int | None = None) -> None:
        self.file, self.size = file, file.size()
        # The type and shape of each tensor in the file, and where the tensor begins, in bytes from the file's
        # start. Both are empty except in a TensorFile.
        self.specs: dict[str, TensorSpec] = {}
        self.begins: dict[str, int] = {}
        if expected_size not in (None, self.size):
            raise CorruptSnapshot(f"{file.what} has {self.size:,} bytes instead of {expected_size:,}")


class TensorFile(StoredFile):
    """A safetensors file. The constructor also reads and checks the header; `read` reads a tensor.

    The constructor raises CorruptSnapshot if the file is missing or its size or header is wrong, and
    UnreadableSnapshot if the file cannot be read. It does not check the numbers or the file's SHA-256.
    """

    def __init__(self, file: SourceFile, expected_size: int | None = None) -> None:
        super().__init__(file, expected_size)
        if self.size < LENGTH_BYTES:
            raise CorruptSnapshot(f"{file.what} has {self.size} bytes and no header")
        length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
        if length > min(MAX_HEADER, self.size - LENGTH_BYTES):
            raise CorruptSnapshot(f"the header of {file.what} cannot have {length:,} bytes")
        header = file.read(0, LENGTH_BYTES + length)
        self.specs = parse_specs(header[LENGTH_BYTES:], f"the header of {file.what}")
        # Tensors of these types and shapes, one after the other, give exactly one header.
        layout = lay_out("", self.specs)
        if (layout.header, layout.size) != (header, self.size):
            raise CorruptSnapshot(f"the header of {file.what} does not describe its {self.size:,} bytes")
        self.begins = layout.begins
        for name, begin in self.begins.items():
            if begin % self.specs[name].dtype.itemsize:
                raise wrong(name, "its numbers are not aligned")

    def read(self, name: str) -> Tensor:
        """Return the tensor `name` in new memory. Raises KeyError, or the errors of `SourceFile.read`."""
        spec = self.specs[name]
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device="cpu")
        self.file.read_into(self.begins[name], memory_of(tensor.view(-1).view(torch.uint8)))
        return tensor


def parse_specs(text: bytes, what: str) -> dict[str, TensorSpec]:
    """Return the type and shape of each tensor in a safetensors header, in the header's order.

    `text` is the header's JSON. Raises CorruptSnapshot, whose message calls the header `what`, if `text` is
    not a JSON object, an entry has no shape or no type of DTYPES, or a size is not an int of at least 0.
    """
    try:
        specs = {
            name: TensorSpec(DTYPES[entry["dtype"]], tuple(entry["shape"]))
            for name, entry in parse_object(text, what).items()
        }
    except (KeyError, TypeError):
        raise CorruptSnapshot(f"{what} lacks a tensor's type or shape") from None
    sizes = [size for spec in specs.values() for size in spec.shape]
    if not all(isinstance(size, int) and size >= 0 for size in sizes):
        raise CorruptSnapshot(f"{what} holds a shape with sizes that are not counts")
    return specs


def wrong(name: str, reason: str) -> CorruptSnapshot:
    return CorruptSnapshot(f"its tensor {name[:100]!r}: {reason}")


def check_finite(name: str, numbers: Tensor) -> None:
    """Raise CorruptSnapshot if `numbers`, of a type that `torch.aminmax` takes, are not all finite.

    `numbers` has all or some elements of the tensor `name`. The error's message has this name.
    """
    if numbers.is_floating_point() and numbers.numel():
        low, high = numbers.aminmax()  # NaN if any element is
        if not math.isfinite(low) or not math.isfinite(high):
            raise wrong(name, "it holds numbers that are not finite")
