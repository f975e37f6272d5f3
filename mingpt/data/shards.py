"""Token shards as one array: a folder or pattern of nanoGPT's or llm.c's .bin files, never read whole.

Nothing is mapped: a window is one `pread`, so resident memory does not grow with the data.
"""

import contextlib
import hashlib
import os
import resource
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.base.errors import ExpectedError, UserError
from mingpt.data.shard_files import (
    ShardFile,
    find_files,
    has_pattern,
    in_order,
    inspect,
    is_users_mistake,
    is_validation,
    open_file,
    read_at,
    read_meta,
)

MAX_OPEN_FILES = 256
LOCAL = ("file://", "local://")


def is_shards(path: str) -> bool:
    """Whether `data.path` names token shards: a folder, a pattern, or a name that ends in .bin.

    A URL is judged by its name alone: nothing is asked over the network.
    """
    local = local_path(path)
    if local is None:
        scheme, _, rest = path.partition("://")
        if scheme in ("http", "https"):
            rest = rest.partition("/")[2].partition("?")[0]  # a host may be [::1]
        return rest.endswith(".bin") or has_pattern(rest)
    if os.path.isdir(local):
        return True
    return local.endswith(".bin") or (has_pattern(local) and not os.path.lexists(local))


def local_path(path: str) -> str | None:
    """The path in this machine's file system; None for a URL of another kind."""
    for scheme in LOCAL:
        path = path.removeprefix(scheme)
    return None if "://" in path else os.path.expanduser(path)


class ShardReader:
    """Reads tokens of checked files with a bounded number of open ones, the most recently used.

    Any thread may read. The descriptors are closed with the object.
    """

    def __init__(self, files: Sequence[ShardFile]) -> None:
        self.files = files
        soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        few = 4 if soft_limit == resource.RLIM_INFINITY else soft_limit // 4
        self._max_open = max(1, min(MAX_OPEN_FILES, few))
        self._open: dict[int, int] = {}  # by file number, least recently used first
        self._lock = threading.Lock()  # a descriptor must not be closed, and given anew, during a read
        weakref.finalize(self, close_all, self._open)

    def read(self, number: int, first: int, count: int) -> np.ndarray:
        """(count,) tokens of a file from token `first` on, in the file's type.

        Raises UserError if the file is not what it was when it was checked, ExpectedError if reading fails.
        """
        file = self.files[number]
        size = file.dtype.itemsize
        offset = file.offset + first * size
        with self._lock, errors_name(file):
            descriptor = self._descriptor(number)
            content = read_at(descriptor, count * size, offset)
            if len(content) < count * size:
                raise changed(file, os.fstat(descriptor).st_size)
        return np.frombuffer(content, dtype=file.dtype)

    def _descriptor(self, number: int) -> int:
        """That of an open file, which it opens if need be. Raises UserError if its size has changed."""
        descriptor = self._open.pop(number, None)
        if descriptor is None:
            while len(self._open) >= self._max_open:
                os.close(self._open.pop(next(iter(self._open))))
            file = self.files[number]
            descriptor = open_file(file.path)
            size = os.fstat(descriptor).st_size
            if size != file.size:
                os.close(descriptor)
                raise changed(file, size)
        self._open[number] = descriptor
        return descriptor


def close_all(descriptors: dict[int, int]) -> None:
    while descriptors:
        os.close(descriptors.popitem()[1])


def changed(file: ShardFile, size: int) -> UserError:
    return UserError(
        f"{file.path} has changed while it was in use, from {file.size:,} bytes to {size:,}: put back the "
        "file that the run began with"
    )


@contextlib.contextmanager
def errors_name(file: ShardFile) -> Iterator[None]:
    """An OSError becomes a sentence that names the file."""
    try:
        yield
    except OSError as error:
        sentence = f"{file.path} cannot be read: {error.strerror}"
        if is_users_mistake(error):
            raise UserError(f"{sentence}; it was there when the run began") from None
        raise ExpectedError(sentence) from None


class TokenShards:
    """The tokens `first` .. `stop` of all files, one after the other: one array, read by windows."""

    def __init__(self, reader: ShardReader, first: int, stop: int) -> None:
        self._reader = reader
        self._first, self._stop = first, stop
        self._borders = np.cumsum([0, *(file.tokens for file in reader.files)])  # where each file begins

    def __len__(self) -> int:
        return self._stop - self._first

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """(B, length) int64: for each start s the tokens s .. s + length, also across files.

        Raises IndexError for a window outside of the array, UserError if a file has changed or is gone.
        """
        windows = np.empty((len(starts), length), dtype=np.int64)
        for row, column, number, first, count in self._pieces(starts, length):
            windows[row, column : column + count] = self._reader.read(number, first, count)
        return windows

    def where(self, position: int) -> str:
        """The token's number in its file, and the file, for an error message."""
        number = int(np.searchsorted(self._borders, position + self._first, side="right")) - 1
        token = position + self._first - int(self._borders[number])
        return f"token {token:,} of {self._reader.files[number].path}"

    def _pieces(
        self, starts: Sequence[int] | np.ndarray, length: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """What to read: row and column of a window, file, its first token, how many.

        File by file, so that a batch opens each file once at most, however few may be open.
        """
        positions = np.asarray(starts, dtype=np.int64)
        if len(positions) and not 0 <= positions.min() <= positions.max() <= len(self) - length:
            raise IndexError(f"windows of {length} from {starts} do not lie in {len(self)} tokens")
        positions = positions + self._first
        order = np.argsort(positions)
        positions = positions[order]
        numbers = np.searchsorted(self._borders, positions, side="right") - 1
        firsts = positions - self._borders[numbers]
        left = self._borders[numbers + 1] - positions  # tokens from here to the end of the file
        windows = (order.tolist(), numbers.tolist(), firsts.tolist(), left.tolist())
        for row, number, first, here in zip(*windows, strict=True):
            if here >= length:
                yield row, 0, number, first, length
                continue
            column = 0
            while column < length:
                count = min(length - column, self._reader.files[number].tokens - first)
                yield row, column, number, first, count
                column, number, first = column + count, number + 1, 0


@dataclass(frozen=True)
class ShardData:
    """Token shards, split and checked.

    `files` has each file's fingerprint by name, in the order of reading; `fingerprint` is the SHA-256 over
    these in hex. `meta` is the folder's meta.json; its `val_bytes` is None where other files are read than it
    lists.
    """

    fingerprint: str
    files: dict[str, str]
    train: TokenShards
    val: TokenShards
    folder: Path  # where a tokenizer.json may lie
    meta: dict[str, Any] | None


def open_shards(path: str, val_fraction: float) -> ShardData:
    """Find, order and check the files; split them by name, or by `val_fraction` if none is named *val*.

    Raises UserError, naming the file, unless all are token shards and each part has at least 2 tokens.
    """
    local = local_path(path)
    if local is None:
        raise UserError(f"data.path {path} names token shards at a URL: copy them to a local or shared disk")
    folder, names, whole = find_files(local)
    meta = read_meta(folder)
    entries = {entry["name"]: entry for entry in meta["files"]} if meta else {}
    if meta and whole:
        check_listed(folder, names, entries)
    if meta and set(names) != entries.keys():
        meta = meta | {"val_bytes": None}
    names = in_order(folder, names)
    n_train_files = sum(not is_validation(name) for name in names)
    if not n_train_files:
        raise UserError(
            f"data.path {path} has only files named *val*, such as {folder / names[0]}: files with other "
            "names are needed for training"
        )
    files = [inspect(str(folder / name), entries.get(name)) for name in names]
    total = sum(file.tokens for file in files)
    by_name = n_train_files < len(files)
    n_train = (
        sum(file.tokens for file in files[:n_train_files]) if by_name else int(total * (1 - val_fraction))
    )
    for part, count in (("training", n_train), ("validation", total - n_train)):
        if count < 2:
            way_out = "" if by_name else ", or another data.val_fraction"
            raise UserError(
                f"the {part} part of {path} has {count} token{'' if count == 1 else 's'}, at least 2 are "
                f"needed: use longer shards{way_out}"
            )
    reader = ShardReader(files)
    digests = {name: file.fingerprint for name, file in zip(names, files, strict=True)}
    return ShardData(
        hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        digests,
        TokenShards(reader, 0, n_train),
        TokenShards(reader, n_train, total),
        folder,
        meta,
    )


def check_listed(folder: Path, names: Sequence[str], entries: dict[str, Any]) -> None:
    """Raises UserError unless the folder holds the shards that its meta.json lists, and no other."""
    missing = sorted(entries.keys() - set(names))
    if missing:
        raise UserError(
            f"{folder / missing[0]} is missing, and meta.json lists it: copy it there, or prepare it again"
        )
    other = sorted(set(names) - entries.keys())
    if other:
        raise UserError(f"{folder / other[0]} is not in {folder / 'meta.json'}: move it to another folder")
