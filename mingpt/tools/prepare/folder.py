"""The output folder: files appear in it whole or not at all, and a record says how far the command has come.

The record, `prepare.json`, is no part of the data. With it the same command continues, and another command is
refused. Shards are files of tokens in llm.c's format, first of the training part, then of validation; the
last one of a part may be shorter than the others.
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
import pydantic

from mingpt.base.errors import UserError
from mingpt.base.files import (
    BadJson,
    Count,
    Sha256,
    atomic_file,
    check_json,
    read_json,
    write_all,
    write_atomic,
)
from mingpt.data.shard_files import FORMATS, HEADER_BYTES, FileMeta
from mingpt.tools.prepare.documents import InputStats

RECORD = "prepare.json"
META = "meta.json"
TOKENIZER = "tokenizer.json"
PARTIAL = ".partial"
WAY_OUT = "name another --out"


def make_header(tokens: int, dtype: np.dtype) -> bytes:
    magic, version = next(known for known, kind in FORMATS.items() if kind == dtype)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = [magic, version, tokens]
    return header.tobytes()


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a UserError that names `path` and tells how to go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; once that is put right, the same command goes on "
            "from the last finished file"
        ) from None


def write_file(path: Path, content: bytes | dict[str, Any]) -> None:
    """Write bytes, or JSON, so that the file is there whole, and durable, or not at all. Raises UserError."""
    if isinstance(content, dict):
        content = (json.dumps(content, indent=1) + "\n").encode()
    with writable(path):
        write_atomic(path, content)


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[None]:
    """Make the folder, and lock it until the block ends. Raises UserError, also if it is locked already."""
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
        yield
    finally:
        os.close(descriptor)


class Shard(FileMeta):
    """A finished shard. The next one begins in batch number `batch`, after its first `skip` tokens."""

    batch: Count
    skip: Count

    @property
    def is_val(self) -> bool:
        return self.name.startswith("val")


class Record(pydantic.BaseModel):
    """The content of prepare.json: the command's options and files, and what it has done so far."""

    command: dict[str, Any]
    stats: InputStats | None = None
    tokenizer: Sha256 | None = None  # of tokenizer.json
    shards: list[Shard] = []  # finished, in order
    is_complete: bool = False

    def save(self, folder: Path) -> None:
        """Write the record to the folder, whole or not at all. Raises UserError."""
        write_file(folder / RECORD, self.model_dump())


def open_record(folder: Path, command: dict[str, Any]) -> Record:
    """Return the folder's record, up to the first shard that is missing; a new one for an empty folder.

    Raises UserError if the folder has other files, another command's record, or one that cannot be read.
    """
    path = folder / RECORD
    try:
        record = check_json(read_json(path), Record)
    except FileNotFoundError:
        others = sorted(set(os.listdir(folder)) - {RECORD + PARTIAL})
        if others:
            raise UserError(f"--out {folder} holds other files ({others[0]}): {WAY_OUT}") from None
        return Record(command=command)
    except (OSError, BadJson) as error:
        raise UserError(f"{path} cannot be read ({error}): {WAY_OUT}") from None
    for key in record.command | command:
        old, new = record.command.get(key), command.get(key)
        if old != new:
            raise UserError(
                f"--out {folder} holds the work of a command with {key} {old}, and this one has {key} {new}: "
                f"{WAY_OUT}"
            )
    for place, shard in enumerate(record.shards):
        shard_path = folder / shard.name
        if not shard_path.is_file() or shard_path.stat().st_size != shard.bytes:
            del record.shards[place:]  # this shard and all after it are written again
            break
    return record


def check_tokenizer(folder: Path, digest: str | None) -> None:
    """Raise UserError unless the folder's tokenizer.json can be read and has this SHA-256."""
    path = folder / TOKENIZER
    try:
        found = digest_of(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if found != digest:
        raise UserError(f"{path} has sha256 {found}, and the shards were made with {digest}")


class ShardWriter:
    """Writes the tokens of batches, in their order, to shards, and saves `record` after each shard.

    The caller begins with batch number `first_batch`: those before it are in finished shards. The unfinished
    shard is removed when `unfinished` is left by an error.
    """

    def __init__(
        self,
        folder: Path,
        record: Record,
        dtype: np.dtype,
        shard_tokens: int,
        unfinished: contextlib.ExitStack,
    ) -> None:
        self.folder, self.record, self.dtype, self.shard_tokens = folder, record, dtype, shard_tokens
        last = record.shards[-1] if record.shards else None
        self.first_batch = last.batch if last else 0
        self._next_batch = self.first_batch
        self._skip = last.skip if last else 0
        self._is_val = last.is_val if last else False
        self._unfinished = unfinished
        self._file: io.FileIO | None = None
        self._count = 0  # tokens in the shard at hand

    def write(self, tokens: np.ndarray, is_val: bool) -> None:
        """Append the next batch's tokens; training batches come first. Raises UserError if that fails."""
        if is_val and not self._is_val:
            self.finish_shard(0)
            self._is_val = True
        done, self._skip = self._skip, 0
        while done < len(tokens):
            part = tokens[done : done + self.shard_tokens - self._count]
            self._append(part)
            done += len(part)
            if self._count == self.shard_tokens:
                self.finish_shard(done)
        self._next_batch += 1

    def _path(self) -> Path:
        """Return the path of the shard that is being written, or written next."""
        number = sum(shard.is_val == self._is_val for shard in self.record.shards)
        return self.folder / f"{'val' if self._is_val else 'train'}_{number:05d}.bin"

    def _append(self, tokens: np.ndarray) -> None:
        with writable(self._path()):
            if self._file is None:
                self._file = self._unfinished.enter_context(atomic_file(self._path()))
                write_all(self._file.write, bytes(HEADER_BYTES))  # `finish_shard` replaces these zeros
            write_all(self._file.write, tokens.tobytes())
        self._count += len(tokens)

    def finish_shard(self, skip: int = 0) -> None:
        """Complete the shard, if one is open; record that the next skips `skip` tokens of this batch."""
        if self._file is None:
            return
        path = self._path()
        with writable(path):
            self._file.seek(0)
            write_all(self._file.write, make_header(self._count, self.dtype))
            self._unfinished.close()
            size, digest = path.stat().st_size, digest_of(path)
        self._file, tokens, self._count = None, self._count, 0
        shard = Shard(
            name=path.name, tokens=tokens, bytes=size, sha256=digest, batch=self._next_batch, skip=skip
        )
        self.record.shards.append(shard)
        self.record.save(self.folder)
