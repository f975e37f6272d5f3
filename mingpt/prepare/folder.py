"""The output folder: files appear in it whole or not at all, and a record says how far the command has come.

`prepare.json` is the record. It is no part of the data: it tells the same command from another one.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.errors import UserError

RECORD = "prepare.json"
META = "meta.json"
TOKENIZER = "tokenizer.json"
PARTIAL = ".partial"


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


def write_atomic(path: Path, content: bytes) -> None:
    """The file is there whole, and durable, or not at all. Raises UserError."""
    partial = path.with_name(path.name + PARTIAL)
    with writable(path):
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        give_name(partial, path)


def give_name(partial: Path, path: Path) -> None:
    os.replace(partial, path)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
        write_atomic(self.folder / RECORD, to_json({name: getattr(self, name) for name in names}))

    def finish(self) -> None:
        """Nothing is left to go on from. Raises UserError."""
        self.stats, self.shards, self.val, self.is_complete = None, [], None, True
        self.save()


def open_record(folder: Path, command: dict[str, Any]) -> Record:
    """That of the same command before, or a new one. Raises UserError if other content is there."""
    way_out = "name another --out, or remove it"
    if not (folder / RECORD).exists():
        others = sorted(set(os.listdir(folder)) - {RECORD + PARTIAL})
        if others:
            raise UserError(f"--out {folder} holds other files ({others[0]}): {way_out}")
        return Record(folder, command)
    try:
        record = Record(folder, **json.loads((folder / RECORD).read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{folder / RECORD} cannot be read ({error}): {way_out}") from None
    changed = [key for key in command if record.command.get(key) != command[key]]
    if changed:
        raise UserError(f"--out {folder} holds the work of a command with other {changed[0]}: {way_out}")
    keep_intact_shards(record)
    return record


def keep_intact_shards(record: Record) -> None:
    """Forget the first shard that is not there with its size, and all behind it."""
    for place, shard in enumerate(record.shards):
        path = record.folder / shard["name"]
        if not path.is_file() or path.stat().st_size != shard["bytes"]:
            del record.shards[place:]
            return
