"""The output folder: files appear in it whole or not at all, and a record says how far the command has come.

`prepare.json` is the record. It is no part of the data: it tells the same command from another one. Shards
are files of tokens in llm.c's format: full ones, then a shorter last one, first of the training part, then of
validation.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import PIECE_BYTES, fsync_path, read_json, write_all, write_atomic
from mingpt.data.shard_files import FORMATS, HEADER_BYTES, ShardFile, read_meta
from mingpt.tools.prepare.documents import Batch, Encoder, Position

RECORD = "prepare.json"
META = "meta.json"
TOKENIZER = "tokenizer.json"
PARTIAL = ".partial"
WAY_OUT = "name another --out"


def make_header(tokens: int, dtype: np.dtype) -> bytes:
    magic, version = next((magic, version) for magic, (version, kind) in FORMATS.items() if kind == dtype)
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = [magic, version, tokens]
    return header.tobytes()


def read_through(path: Path, info: ShardFile | None = None) -> tuple[str, int]:
    """sha256 of the whole file, and the largest of its tokens (-1 without `info`, or for none)."""
    digest, largest = hashlib.sha256(), -1
    with open(path, "rb") as file:
        if info:
            digest.update(file.read(info.offset))
        while content := file.read(PIECE_BYTES):
            digest.update(content)
            if info:
                whole = len(content) // info.dtype.itemsize * info.dtype.itemsize
                largest = max(largest, int(np.frombuffer(content[:whole], dtype=info.dtype).max(initial=0)))
    return digest.hexdigest(), largest


@contextlib.contextmanager
def writable(path: Path) -> Iterator[None]:
    """What goes wrong in writing becomes a UserError that says how to go on."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}; once that is put right, the same command goes on "
            "from the last finished file"
        ) from None


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole, and durable, or not at all. Raises UserError."""
    with writable(path):
        write_atomic(path, content)


def to_json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[None]:
    """Make the folder, and keep other commands like this one out. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"--out {path} is a file, or below one: name a folder") from None
    except OSError as error:
        raise UserError(f"--out {path} cannot be made: {error.strerror}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another command writes to --out {path} now") from None
        except OSError:
            pass  # a file system that has no locks
        yield
    finally:
        os.close(descriptor)


@dataclass
class Record:
    """What a command has done so far in its folder."""

    folder: Path
    command: dict[str, Any]
    stats: dict[str, Any] | None = None
    tokenizer: str | None = None  # sha256 of tokenizer.json
    shards: list[dict[str, Any]] = field(default_factory=list)  # finished, in order
    val: dict[str, int] | None = None  # where the validation part begins
    is_complete: bool = False

    def save(self) -> None:
        """Raises UserError."""
        names = ("command", "stats", "tokenizer", "shards", "val", "is_complete")
        write_file(self.folder / RECORD, to_json({name: getattr(self, name) for name in names}))

    def finish(self) -> None:
        """Nothing is left to go on from. Raises UserError."""
        self.stats, self.shards, self.val, self.is_complete = None, [], None, True
        self.save()


def open_record(folder: Path, command: dict[str, Any]) -> Record:
    """That of the same command before, or a new one. Raises UserError if other content is there."""
    if not (folder / RECORD).exists():
        others = sorted(set(os.listdir(folder)) - {RECORD + PARTIAL})
        if others:
            raise UserError(f"--out {folder} holds other files ({others[0]}): {WAY_OUT}")
        return Record(folder, command)
    try:
        record = Record(folder, **read_json(folder / RECORD))
        check_types(record)
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder / RECORD} cannot be read ({reason}): {WAY_OUT}") from None
    changed = next((key for key in command if record.command.get(key) != command[key]), None)
    if changed:
        difference = describe_change(changed, record.command, command)
        raise UserError(f"--out {folder} holds the work of a command with {difference}: {WAY_OUT}")
    keep_intact_shards(record)
    return record


def check_types(record: Record) -> None:
    """Raises TypeError or KeyError for a record that this program did not write."""
    shard = {"name": str, "bytes": int, "tokens": int, "sha256": str, "part": str, "skip": int}
    checks: list[tuple[Any, Any]] = [
        (record.command, dict),
        (record.command["files"], list),
        *((file[key], str) for file in record.command["files"] for key in ("path", "path_sha256", "version")),
        (record.stats, (dict, type(None))),
        (record.tokenizer, (str, type(None))),
        (record.shards, list),
        *((entry[key], kind) for entry in record.shards for key, kind in shard.items()),
        *((entry["position"], dict) for entry in record.shards),
        (record.val, (dict, type(None))),
        (record.is_complete, bool),
    ]
    wrong = next((value for value, kind in checks if not isinstance(value, kind)), None)
    if wrong is not None:
        raise TypeError(f"a value of another type, {str(wrong)[:50]}")


def describe_change(key: str, old: dict[str, Any], new: dict[str, Any]) -> str:
    """What differs between two commands, with both values."""
    if key == "tokenizer_sha256":
        return (
            f"--tokenizer {new['tokenizer']} of sha256 {str(old.get(key))[:12]}, now it has {new[key][:12]}"
        )
    if key != "files":
        return f"--{key} {old.get(key)}, and this one has --{key} {new[key]}"
    if len(old[key]) != len(new[key]):
        return f"{len(old[key])} files, and this one has {len(new[key])}"
    before, now = next(pair for pair in zip(old[key], new[key], strict=True) if pair[0] != pair[1])
    if before["path_sha256"] != now["path_sha256"]:
        return f"{before['path']}, and this one has {now['path']} in its place"
    return f"{before['path']} of {before['version']}, and now it has {now['version']}"


def check_complete(folder: Path) -> None:
    """Raises UserError unless a finished folder has its files, the shards with their sizes."""
    try:
        meta = read_meta(folder)
    except UserError as error:
        raise UserError(f"{error}, with another --out") from None
    sizes = {entry["name"]: entry["bytes"] for entry in meta["files"]} if meta else {}
    for name in (META, *sizes, TOKENIZER):
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path} is missing: put it back, or {WAY_OUT}")
        size = path.stat().st_size
        if name in sizes and size != sizes[name]:
            raise UserError(
                f"{path} has {size:,} bytes, and {META} says {sizes[name]:,}: put back the file that prepare "
                f"wrote, or {WAY_OUT}"
            )
    digest = hashlib.sha256((folder / TOKENIZER).read_bytes()).hexdigest()
    if meta and digest != meta["tokenizer"]["sha256"]:
        raise UserError(
            f"{folder / TOKENIZER} is not that of {META}: put back the file that prepare wrote, or {WAY_OUT}"
        )


def keep_intact_shards(record: Record) -> None:
    """Forget the first shard that is not there with its size, and all behind it."""
    for place, shard in enumerate(record.shards):
        path = record.folder / shard["name"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            del record.shards[place:]
            return


class ShardWriter:
    """Writes batches in their order. After each shard the record says from where to go on.

    `position` is where reading must begin; the tokens that lie in finished shards already are dropped.
    """

    def __init__(self, record: Record, encoder: Encoder, shard_tokens: int) -> None:
        self.record, self.encoder, self.shard_tokens = record, encoder, shard_tokens
        nothing = {"position": {}, "skip": 0, "part": "train"}
        last: dict[str, Any] = record.shards[-1] if record.shards else nothing
        self.position = Position(**last["position"])
        self._skip: int = last["skip"]
        self._part: str = last["part"]
        self._file: io.FileIO | None = None
        self._count = 0  # tokens in the shard at hand

    def write(self, batch: Batch, tokens: np.ndarray) -> None:
        """Append the tokens of the next batch. Raises UserError if they cannot be written."""
        if batch.is_val and self._part == "train":
            self._finish_shard(batch.before, 0)
            self._part = "val"
            start = batch.before.start + batch.before.bytes
            self.record.val = {"document": batch.before.document, "start": start}
        if self.record.val is not None and "first_token" not in self.record.val and len(tokens):
            text = next((text for text in batch.texts if text), "")
            self.record.val["first_token"] = self.encoder.first_token_bytes(text, int(tokens[0]))
        done = min(self._skip, len(tokens))
        self._skip -= done
        while done < len(tokens):
            part = tokens[done : done + self.shard_tokens - self._count]
            self._append(part)
            done += len(part)
            if self._count == self.shard_tokens:
                self._finish_shard(batch.before, done)
        self.position = batch.after

    def close(self) -> None:
        """The last shard. Raises UserError."""
        self._finish_shard(self.position, 0)

    def abandon(self) -> None:
        """Give the room of an unfinished shard back, which may be what the disk lacks."""
        if self._file:
            with contextlib.suppress(OSError):
                os.unlink(self._file.name)
            with contextlib.suppress(OSError):
                self._file.close()

    def _name(self) -> str:
        number = sum(shard["part"] == self._part for shard in self.record.shards)
        return f"{self._part}_{number:05d}.bin"

    def _append(self, tokens: np.ndarray) -> None:
        path = self.record.folder / (self._name() + PARTIAL)
        with writable(path):
            if self._file is None:
                self._file = io.FileIO(path, "wb")
                write_all(self._file.write, bytes(HEADER_BYTES))  # the real one follows when all is there
            write_all(self._file.write, tokens.tobytes())
        self._count += len(tokens)

    def _finish_shard(self, position: Position, skip: int) -> None:
        """Name the shard. Going on begins at `position`, without the first `skip` tokens from there."""
        if self._file is None:
            return
        name = self._name()
        path = self.record.folder / name
        partial = path.with_name(name + PARTIAL)
        with writable(path):
            self._file.seek(0)
            write_all(self._file.write, make_header(self._count, self.encoder.dtype))
            os.fsync(self._file.fileno())
            self._file.close()
            digest, _ = read_through(partial)
            os.replace(partial, path)
            fsync_path(path.parent)
            size = path.stat().st_size
        shard = {"name": name, "tokens": self._count, "bytes": size, "sha256": digest}
        self._file, self._count = None, 0
        self.record.shards.append({**shard, "part": self._part, "position": asdict(position), "skip": skip})
        self.record.save()
