"""Read token shards (nanoGPT's or llm.c's .bin files of tokens) as one array, by windows, never whole.

No file is mapped into memory: if a mapped file were cut short, or its network failed, a signal would end the
process, and resident memory would grow with the data.
"""

import bisect
import contextlib
import hashlib
import itertools
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mingpt.base.errors import ExpectedError, UserError
from mingpt.data.shard_files import ShardFile, find_files, has_pattern, inspect, is_validation, read_meta

LOCAL = ("file://", "local://")


def is_shards(path: str) -> bool:
    """Return whether `path`, a data.path, names token shards: a folder, a pattern, or a name ending in .bin.

    A URL is judged by its name alone, without the network; a file with *, ? or [ in its name is no pattern.
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
    """Return the path, ~ expanded, of a local path, file:// or local:// URL; None for any other URL."""
    for scheme in LOCAL:
        path = path.removeprefix(scheme)
    return None if "://" in path else os.path.expanduser(path)


@contextlib.contextmanager
def open_unchanged(file: ShardFile) -> Iterator[BinaryIO]:
    """Open a checked file. An OSError, also in the block, becomes an error with one sentence on the file.

    Raises UserError if the file is gone, may not be read or has another size than when it was checked, and
    ExpectedError for any other OSError, which may be temporary.
    """
    try:
        with open(file.path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                raise UserError(
                    f"{file.path} has changed while it was in use, from {file.size:,} bytes to {size:,}: put "
                    "back the file that the run began with"
                )
            yield stream
    except (FileNotFoundError, PermissionError) as error:
        sentence = f"{file.path} cannot be read: {error.strerror}; it was there when the run began"
        raise UserError(sentence) from None
    except OSError as error:
        raise ExpectedError(f"{file.path} cannot be read: {error.strerror}") from None


class TokenShards:
    """The tokens `first` to `stop` - 1 of the files, taken end to end, as one array, read by windows.

    A file is open only while some of it is read, so any thread or forked process may read.
    """

    def __init__(self, files: Sequence[ShardFile], first: int, stop: int) -> None:
        self._files, self._first, self._stop = files, first, stop
        self._borders = [0, *itertools.accumulate(file.tokens for file in files)]  # where each file begins

    def __len__(self) -> int:
        return self._stop - self._first

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return `length` tokens from each of `starts` on, across files, too: (len(starts), length) int64.

        Raises IndexError for a window outside of the array, UserError if a file is gone, forbidden or of
        another size than when it was checked, ExpectedError if reading fails otherwise.
        """
        windows = np.empty((len(starts), length), dtype=np.int64)
        for number, pieces in itertools.groupby(self._pieces(starts, length), key=operator.itemgetter(0)):
            file = self._files[number]
            with open_unchanged(file) as stream:
                for _, row, column, first, count in pieces:
                    stream.seek(file.offset + first * file.dtype.itemsize)
                    content = stream.read(count * file.dtype.itemsize)
                    windows[row, column : column + count] = np.frombuffer(content, dtype=file.dtype)
        return windows

    def where(self, position: int) -> str:
        """Return the place of the token at `position`, for an error message: "token 7 of FILE"."""
        number = self._file_at(position + self._first)
        token = position + self._first - self._borders[number]
        return f"token {token:,} of {self._files[number].path}"

    def file_count(self) -> int:
        """Return the number of files that hold some of this array's tokens."""
        return self._file_at(self._stop - 1) - self._file_at(self._first) + 1

    def _file_at(self, position: int) -> int:
        return bisect.bisect_right(self._borders, position) - 1

    def _pieces(
        self, starts: Sequence[int] | np.ndarray, length: int
    ) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the reads of all windows, sorted by position, so that a batch opens few files.

        A read is (number of the file, row or place in `starts`, column or place in the window, first token in
        the file, number of tokens). Raises IndexError for a window outside of the array.
        """
        for row in np.argsort(starts).tolist():
            start = int(starts[row])
            if not 0 <= start <= len(self) - length:
                raise IndexError(f"the window of {length} from {start} does not lie in {len(self)} tokens")
            position, column = start + self._first, 0
            number = self._file_at(position)
            while column < length:
                count = min(length - column, self._borders[number + 1] - position)
                yield number, row, column, position - self._borders[number], count
                position, column, number = position + count, column + count, number + 1


@dataclass(frozen=True)
class ShardData:
    """Checked token shards, split into a training and a validation part.

    `files` has each file's fingerprint (a hash) by name, in the order of reading; `fingerprint` is, in hex,
    the SHA-256 over these. `meta` is the content of the folder's meta.json, if there is one; its `val_bytes`
    is replaced by None if the files that are read are not exactly those that meta.json lists.
    """

    fingerprint: str
    files: dict[str, str]
    train: TokenShards
    val: TokenShards
    folder: Path  # where a tokenizer.json may lie
    meta: dict[str, Any] | None


def open_shards(path: str, val_fraction: float) -> ShardData:
    """Find, order and check the files of `path`: a folder, a pattern or one .bin file; split their tokens.

    Files with the word val, valid or validation in their names are for validation. If there are none, the
    last `val_fraction` of all tokens is. Raises UserError for a URL, for files that are missing, unreadable
    or no whole token shards, for an unusable meta.json, if meta.json lists other files than the folder
    `path` has, or if the training or validation part has fewer than 2 tokens.
    """
    local = local_path(path)
    if local is None:
        raise UserError(f"data.path {path} names token shards at a URL: copy them to a local or shared disk")
    found = find_files(local)
    folder, names = found[0].parent, [file.name for file in found]
    meta = read_meta(folder)
    entries = {entry["name"]: entry for entry in meta["files"]} if meta else {}
    if meta and os.path.isdir(local):
        check_listed(folder, names, entries)
    if meta and set(names) != entries.keys():
        meta = meta | {"val_bytes": None}
    names = sorted(names, key=lambda name: (is_validation(name), name))
    n_train_files = sum(not is_validation(name) for name in names)
    if not n_train_files:
        raise UserError(
            f"data.path {path} has only validation files, such as {folder / names[0]}: files whose names "
            "lack the word val are needed for training"
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
                f"the {part} part of {path} has {count} of at least 2 tokens: use longer shards{way_out}"
            )
    digests = {name: file.fingerprint for name, file in zip(names, files, strict=True)}
    return ShardData(
        hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        digests,
        TokenShards(files, 0, n_train),
        TokenShards(files, n_train, total),
        folder,
        meta,
    )


def check_listed(folder: Path, names: Sequence[str], entries: dict[str, Any]) -> None:
    """Raise UserError unless `names`, the shards in the folder, are the keys of meta.json's `entries`."""
    different = sorted(entries.keys() ^ set(names))
    if different:
        raise UserError(
            f"{folder / different[0]} is missing, or is not in {folder / 'meta.json'}: copy it there, move "
            "it to another folder, or prepare the data again"
        )
