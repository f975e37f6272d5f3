"""The files that the command's arguments name, in a fixed order, and how each is opened."""

import contextlib
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec

from mingpt.data.source import COMPRESSED, KINDS, readable
from mingpt.errors import UserError
from mingpt.redact import redact


@dataclass(frozen=True)
class InputFile:
    """A path or URL. `version` changes when the file does, as far as its storage can tell."""

    path: str
    kind: str  # text, jsonl or parquet
    version: str

    @property
    def shown(self) -> str:
        """Its name without credentials."""
        return redact(self.path)

    def identity(self) -> dict[str, str]:
        """What the record of a command keeps of it."""
        digest = hashlib.sha256(self.path.encode(errors="surrogateescape")).hexdigest()
        return {"path": self.shown, "path_sha256": digest, "kind": self.kind, "version": self.version}


def find_inputs(names: Sequence[str]) -> list[InputFile]:
    """The files in the order of the names, those of a pattern sorted. Raises UserError."""
    found = [make_input(path) for name in names for path in expand(name)]
    if not found:
        raise UserError("there is no text: name at least one file, pattern or URL")
    return found


def expand(name: str) -> list[str]:
    """The paths that a name stands for: itself, or what its pattern matches. Raises UserError if none do."""
    if not is_url(name):
        is_pattern = glob.has_magic(name) and not os.path.exists(name)
        paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    else:
        is_pattern = glob.has_magic(name) and not name.startswith(("http://", "https://"))
        paths = expand_url(name) if is_pattern else []
    if not is_pattern:
        return [name]
    if not paths:
        raise UserError(f"no file matches {name}")
    return paths


def expand_url(pattern: str) -> list[str]:
    with readable(pattern):
        files, path = fsspec.core.url_to_fs(pattern)
        return [files.unstrip_protocol(found) for found in sorted(files.glob(path))]


def make_input(path: str) -> InputFile:
    """Raises UserError for a file that is not there, or a folder."""
    with readable(path):
        files, inner = fsspec.core.url_to_fs(path)
        about = files.info(inner)
    if about["type"] == "directory":
        raise UserError(f"{path} is a folder: name its files by a pattern, such as '{path}/*.txt'")
    changed = next((about[key] for key in ("ETag", "etag", "mtime", "LastModified") if about.get(key)), "")
    name = path.partition("?")[0] if is_url(path) else path
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    return InputFile(path, KINDS.get(suffix, "text"), f"{about.get('size')} bytes, {changed}")


def is_url(path: str) -> bool:
    return "://" in path


@contextlib.contextmanager
def open_input(file: InputFile, offset: int = 0) -> Iterator[Any]:
    """The file's bytes, decompressed, from `offset` on. Raises UserError, also while it is read."""
    with readable(file.path), fsspec.open(file.path, "rb", compression="infer") as stream:
        if not is_url(file.path):
            stream.seek(offset)
        else:  # not every driver can seek
            while offset > 0:
                skipped = len(stream.read(min(offset, 1 << 20)))
                offset = offset - skipped if skipped else 0
        yield stream
