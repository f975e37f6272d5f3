"""Reads a folder of token shards through and says what is wrong with it."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.errors import UserError
from mingpt.prepare.folder import META, PARTIAL, TOKENIZER
from mingpt.prepare.shard_file import ShardInfo, read_info, read_through


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
    except ValueError as error:
        return False, [f"{folder / META}: {error}"]
    if meta is None:
        check_without_meta(folder, found)
    else:
        check_prepared(folder, meta, found)
    whole = f"{folder}: {found.tokens:,} tokens in {found.files} files, largest token {found.largest}"
    return not found.problems, found.problems or [whole]


def read_meta(folder: Path) -> dict[str, Any] | None:
    """meta.json with every field of its type; None if there is none. Raises ValueError."""
    try:
        meta = json.loads((folder / META).read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"it cannot be read: {error}") from None
    try:
        if meta["format"] != 1:
            raise ValueError(f"it has format {meta['format']}, and this program knows 1")
        if meta["complete"] is not True:
            raise ValueError("it says that the folder is not complete: run the command that makes it again")
        types: list[tuple[Any, Any]] = [(meta["tokenizer"]["vocab_size"], int), (meta["files"], list)]
        types += [(meta["tokenizer"]["sha256"], (str, type(None)))]
        for file in meta["files"]:
            types += [(file["name"], str), (file["tokens"], int), (file["bytes"], int), (file["sha256"], str)]
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"it lacks a field, or has one of another kind ({error})") from None
    wrong = [value for value, kind in types if not isinstance(value, kind)]
    if wrong or any(Path(file["name"]).name != file["name"] for file in meta["files"]):
        raise ValueError(
            f"it has a field of another kind ({wrong[0]!r})" if wrong else "it names other folders"
        )
    return dict(meta)


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
        size = path.stat().st_size
        if size != file["bytes"]:
            found.problems.append(f"{path}: {size:,} bytes, and {META} says {file['bytes']:,}")
            return
        info = read_info(path)
        digest, largest = read_through(path, info)
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except ValueError as error:
        found.problems.append(f"{path}: {error}")
        return
    add(found, info, largest)
    if info.tokens != file["tokens"]:
        found.problems.append(f"{path}: {info.tokens:,} tokens, and {META} says {file['tokens']:,}")
    if largest >= vocab_size:
        found.problems.append(f"{path}: holds token {largest}, and the vocabulary has {vocab_size}")
    if digest != file["sha256"]:
        found.problems.append(f"{path}: sha256 is {digest}, and {META} says {file['sha256']}")


def check_without_meta(folder: Path, found: Findings) -> None:
    """Shards of other programs: headers and sizes."""
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        partial = any(path.name.endswith(PARTIAL) for path in folder.iterdir())
        found.problems.append(f"{folder}: holds no .bin file" + (", only unfinished ones" if partial else ""))
    for path in paths:
        try:
            info = read_info(path)
            add(found, info, read_through(path, info)[1])
        except OSError as error:
            found.problems.append(f"{path}: cannot be read: {error.strerror}")
        except ValueError as error:
            found.problems.append(f"{path}: {error}")


def add(found: Findings, info: ShardInfo, largest: int) -> None:
    found.tokens += info.tokens
    found.files += 1
    found.largest = max(found.largest, largest)
