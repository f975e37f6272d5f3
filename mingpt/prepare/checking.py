"""Reads a folder of token shards through and says what is wrong with it."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.data.shard_files import ShardFile, inspect
from mingpt.data.shard_meta import read_meta
from mingpt.errors import UserError
from mingpt.prepare.folder import META, PARTIAL, TOKENIZER
from mingpt.prepare.shard_file import read_through


@dataclass
class Findings:
    """What is wrong, a sentence each that names the file; and what is there."""

    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    files: int = 0
    largest: int = -1  # token


def check_folder(folder: Path) -> tuple[bool, list[str]]:
    """Whether all is well, and lines that say so. Raises UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"--check {folder} is no folder")
    found = Findings()
    try:
        meta = read_meta(folder)
    except UserError as error:
        return False, [str(error)]
    if meta is None:
        check_without_meta(folder, found)
    else:
        check_prepared(folder, meta, found)
    whole = f"{folder}: {found.tokens:,} tokens in {found.files} files, largest token {found.largest}"
    return not found.problems, found.problems or [whole]


def check_prepared(folder: Path, meta: dict[str, Any], found: Findings) -> None:
    """Everything that meta.json says of the folder."""
    listed = [file["name"] for file in meta["files"]]
    for file in meta["files"]:
        check_file(folder / file["name"], file, meta["tokenizer"]["vocab_size"], found)
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            found.problems.append(f"{path}: {META} does not list it")
    expected = meta["tokenizer"]["sha256"]
    path = folder / TOKENIZER
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if expected is not None else None
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    if digest != expected:
        found.problems.append(f"{path}: sha256 is {digest}, and {META} says {expected}")


def check_file(path: Path, file: dict[str, Any], vocab_size: int, found: Findings) -> None:
    try:
        info = inspect(str(path), None)
        digest, largest = read_through(path, info)
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except UserError as error:
        found.problems.append(str(error))
        return
    add(found, info, largest)
    if info.tokens != file["tokens"]:
        found.problems.append(f"{path}: {info.tokens:,} tokens, and {META} says {file['tokens']:,}")
    if largest >= vocab_size:
        found.problems.append(f"{path}: holds token {largest}, and the vocabulary has {vocab_size}")
    if digest != file["sha256"]:
        found.problems.append(f"{path}: sha256 is {digest}, and {META} says {file['sha256']}")


def check_without_meta(folder: Path, found: Findings) -> None:
    """Shards of other programs: headers, sizes and the largest token."""
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        partial = any(path.name.endswith(PARTIAL) for path in folder.iterdir())
        found.problems.append(f"{folder}: holds no .bin file" + (", only unfinished ones" if partial else ""))
    for path in paths:
        try:
            info = inspect(str(path), None)
            add(found, info, read_through(path, info)[1])
        except OSError as error:
            found.problems.append(f"{path}: cannot be read: {error.strerror}")
        except UserError as error:
            found.problems.append(str(error))


def add(found: Findings, info: ShardFile, largest: int) -> None:
    found.tokens += info.tokens
    found.files += 1
    found.largest = max(found.largest, largest)
