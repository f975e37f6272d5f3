"""The output folder: files appear in it whole or not at all, and a record says how far the command has come.

`prepare.json` is the record. It is no part of the data: it tells the same command from another one.
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.data.shard_meta import read_meta
from mingpt.errors import UserError

RECORD = "prepare.json"
META = "meta.json"
TOKENIZER = "tokenizer.json"
PARTIAL = ".partial"
WAY_OUT = "name another --out"


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
    if not (folder / RECORD).exists():
        others = sorted(set(os.listdir(folder)) - {RECORD + PARTIAL})
        if others:
            raise UserError(f"--out {folder} holds other files ({others[0]}): {WAY_OUT}")
        return Record(folder, command)
    try:
        record = Record(folder, **json.loads((folder / RECORD).read_bytes()))
        check_types(record)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
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
