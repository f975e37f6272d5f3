"""The output folder: files appear in it whole or not at all, and meta.json says when all of them are there.

Shards are files of tokens in llm.c's format, first of the training part, then of validation; the last one of
a part may be shorter than the others.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import atomic_file, write_all, write_atomic
from mingpt.data.shard_files import FORMATS, HEADER_BYTES, read_meta

META = "meta.json"
TOKENIZER = "tokenizer.json"
UNFINISHED = {"format": 1, "complete": False}  # in meta.json: nobody takes a part of the data for the whole


def make_header(tokens: int, dtype: np.dtype) -> bytes:
    magic, version = next(known for known, kind in FORMATS.items() if kind == dtype)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = [magic, version, tokens]
    return header.tobytes()


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names `path` and tells what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; once that is put right, remove the folder "
            f"{path.parent} and run the same command again"
        ) from None


def write_file(path: Path, content: bytes | dict[str, Any]) -> None:
    """Write bytes, or JSON, so that the file is there whole, and durable, or not at all. Raises UserError."""
    if isinstance(content, dict):
        content = (json.dumps(content, indent=1) + "\n").encode()
    with writable(path):
        write_atomic(path, content)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[None]:
    """Make the folder, and lock it until the block ends.

    Raises UserError if that fails, if the folder is locked already, or if it is not empty.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"--out {path} cannot be made a folder: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"another command writes to --out {path} now") from None
    except OSError:
        pass  # a file system that has no locks
    try:
        present = sorted(os.listdir(path))
        if present:
            read_meta(path)  # its error says so if prepare was interrupted here
            raise UserError(f"--out {path} holds files already ({present[0]}): name another --out")
        yield
    finally:
        os.close(descriptor)


class ShardWriter:
    """Writes the tokens of batches, in their order, to shards; `files` has their entries of meta.json.

    The unfinished shard is removed when `unfinished` is left by an error.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype, shard_tokens: int, unfinished: contextlib.ExitStack
    ) -> None:
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.files: list[dict[str, Any]] = []
        self._part, self._number = "train", 0  # of the shard that is being written, or written next
        self._unfinished = unfinished
        self._file: io.FileIO | None = None
        self._count = 0  # tokens in the shard at hand

    def write(self, tokens: np.ndarray, is_val: bool) -> None:
        """Append the next batch's tokens; training batches come first. Raises UserError if that fails."""
        if is_val and self._part == "train":
            self.finish_shard()
            self._part, self._number = "val", 0
        while len(tokens):
            room = self.shard_tokens - self._count
            self._append(tokens[:room])
            tokens = tokens[room:]
            if self._count == self.shard_tokens:
                self.finish_shard()

    def _path(self) -> Path:
        return self.folder / f"{self._part}_{self._number:05d}.bin"

    def _append(self, tokens: np.ndarray) -> None:
        with writable(self._path()):
            if self._file is None:
                self._file = self._unfinished.enter_context(atomic_file(self._path()))
                write_all(self._file.write, bytes(HEADER_BYTES))  # `finish_shard` replaces these zeros
            write_all(self._file.write, tokens.tobytes())
        self._count += len(tokens)

    def finish_shard(self) -> None:
        """Complete the shard, if one is open."""
        if self._file is None:
            return
        path = self._path()
        with writable(path):
            self._file.seek(0)
            write_all(self._file.write, make_header(self._count, self.dtype))
            self._unfinished.close()
            with open(path, "rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            size = path.stat().st_size
        entry = {"name": path.name, "tokens": self._count, "bytes": size, "sha256": digest}
        self.files.append(entry)
        self._file, self._count, self._number = None, 0, self._number + 1
