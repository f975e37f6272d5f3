"""Find the files of token shards, bring them into order, and check each against its header.

Formats: nanoGPT's (little-endian uint16, no header, files named train.bin and val.bin) and llm.c's, which is
modded-nanogpt's too (256 int32: magic, version, number of tokens; then uint16 or uint32). `python -m mingpt
prepare` describes its shards in a meta.json beside them, which is checked before it is used.
"""

import glob
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pydantic

from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, Count, Sha256, check_json, read_json, reason_of
from mingpt.data.source import relative_to

HEADER_BYTES = 1024
UINT16: np.dtype[Any] = np.dtype("<u2")
UINT32: np.dtype[Any] = np.dtype("<u4")
FORMATS = {(20240520, 1): UINT16, (20240801, 7): UINT32}  # magic and version: type of a token
HEADERLESS = ("train.bin", "val.bin")
BLOCK_BYTES = 4096  # a fingerprint (a hash) covers the first block, the last and two between
SAMPLE_BYTES = 16384  # of a file's middle; they tell the type of its tokens
MIN_NONZERO = 128  # tokens; by chance, all of them are at even places in less than one of 2^128 files
VALIDATION = re.compile(r"(?<![^\W\d_])val(id|idation)?(?![^\W\d_])")  # not in medieval or eval
Positive = Annotated[int, pydantic.Field(strict=True, gt=0)]


class TokenizerMeta(pydantic.BaseModel):
    sha256: Sha256 | None
    vocab_size: Positive


class FileMeta(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(pattern=r"^[^/\x00]+\.bin$")]
    tokens: Positive
    bytes: Positive
    sha256: Sha256


class Meta(pydantic.BaseModel):
    """The fields of a finished meta.json that this program uses; other fields are ignored."""

    format: Literal[1]
    complete: Literal[True]
    val_bytes: Count | None  # of the validation text, after its first token; None if tokens lose text
    tokenizer: TokenizerMeta
    files: Annotated[list[FileMeta], pydantic.Field(min_length=1)]


@dataclass(frozen=True)
class ShardFile:
    """A checked file of `size` bytes, with `tokens` tokens of type `dtype` from byte `offset` on."""

    path: str
    size: int
    tokens: int
    offset: int
    dtype: np.dtype[Any]
    fingerprint: str


def find_files(path: str) -> list[Path]:
    """Return the files to read, sorted: a folder's .bin files, those of a pattern, or the file `path`.

    The file may be missing. Raises UserError if a folder or pattern has no .bin file, or a pattern has files
    of one name in several folders.
    """
    if os.path.isdir(path):
        pattern = f"{glob.escape(path)}/*.bin"
    elif os.path.lexists(path) or not has_pattern(path):
        return [Path(path)]
    else:
        pattern = path
    found = sorted(Path(name) for name in glob.glob(pattern) if name.endswith(".bin"))
    if not found:
        read_meta(Path(path))  # its error says so if prepare was interrupted before the first shard
        raise UserError(
            f"data.path {path} has no file whose name ends in .bin{relative_to(path)}: name a text, or token "
            "shards, which `python -m mingpt prepare` makes of other files"
        )
    folders = sorted({str(file.parent) for file in found})
    if len(folders) > 1:
        raise UserError(
            f"data.path {path} matches files in several folders, {folders[0]} and {folders[1]}: put them, or "
            "links to them, in one"
        )
    return found


def has_pattern(path: str) -> bool:
    return any(mark in path for mark in "*?[")


def is_validation(name: str) -> bool:
    """Return whether the name has `val`, `valid` or `validation`, in lower case, with no letter beside it."""
    return VALIDATION.search(name) is not None


def inspect(path: str, entry: Mapping[str, Any] | None) -> ShardFile:
    """Check a file's header, type and size; return its layout and fingerprint as a ShardFile.

    `entry` is the file's entry in meta.json, if any: its size must agree, its SHA-256 is not checked, but is
    part of the fingerprint. Raises UserError, naming the file, if the file cannot be read or used.
    """
    if not os.path.isfile(path):  # to open a pipe might wait forever
        raise UserError(f"{path} does not exist, or is no regular file{relative_to(path)}")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            last, middle = size - BLOCK_BYTES, size // 16 * 8
            # In a small file the blocks overlap.
            places = [last * part // 3 for part in range(4 if last > 0 else 1)]
            content = b"".join(os.pread(file.fileno(), BLOCK_BYTES, place) for place in places)
            sample = os.pread(file.fileno(), min(SAMPLE_BYTES, middle), middle)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise UserError(f"{path} cannot be read: {reason_of(error)}") from None
    tokens, offset, dtype = layout(path, content[:HEADER_BYTES], size)
    if dtype == UINT16:
        check_type(path, sample)
    expected = offset + tokens * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes, and {tokens:,} tokens with their header take {expected:,}: copy it "
            "again"
        )
    name = os.fsencode(os.path.basename(path))
    fingerprint = hashlib.sha256(b"%b\0%d\0" % (name, size) + content).hexdigest()
    if entry is not None:
        fingerprint = hashlib.sha256((entry["sha256"] + fingerprint).encode()).hexdigest()
        if (entry["tokens"], entry["bytes"]) != (tokens, size):
            raise UserError(
                f"{path} has {tokens:,} tokens in {size:,} bytes, and the meta.json beside it says "
                f"{entry['tokens']:,} in {entry['bytes']:,}: prepare the data again"
            )
    return ShardFile(path, size, tokens, offset, dtype, fingerprint)


def layout(path: str, header: bytes, size: int) -> tuple[int, int, np.dtype[Any]]:
    """Return a file's number of tokens, the byte offset of the first token, and the tokens' type.

    `header` is the file's first HEADER_BYTES, `size` its length in bytes, which may not fit the header.
    Without a known magic number, a file named as in HEADERLESS is all uint16 tokens. Raises UserError, naming
    the file, for another unknown header.
    """
    magic, version, count = (int.from_bytes(header[at : at + 4], "little", signed=True) for at in (0, 4, 8))
    known = [magic for magic, _ in FORMATS]
    if os.path.basename(path) in HEADERLESS and magic not in known:
        return size // UINT16.itemsize, 0, UINT16
    dtype = FORMATS.get((magic, version))
    if dtype is None:
        raise UserError(
            f"{path} has {size:,} bytes, begins with {magic} and version {version}, and token shards begin "
            f"with {' or '.join(map(str, known))}: if it holds nanoGPT's tokens, name it "
            f"{' or '.join(HEADERLESS)}; otherwise leave it out of data.path"
        )
    return count, HEADER_BYTES, dtype


def check_type(path: str, sample: bytes) -> None:
    """Raise UserError if a file, to be read as uint16, has wider tokens; `sample` is from its middle."""
    low, high = np.frombuffer(sample, UINT16).reshape(-1, 2).T
    if np.count_nonzero(low) >= MIN_NONZERO and high.sum() * 4096 <= low.sum():
        raise UserError(
            f"{path} seems to hold tokens of 4 or 8 bytes, and would be read as uint16: write it as uint32 "
            "after llm.c's header, 256 int32 that begin with 20240801, 7 and the number of tokens"
        )


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the checked content of the folder's meta.json; None if there is no such file.

    Raises UserError if the file cannot be read, is damaged or another program's, or says that prepare has not
    finished.
    """
    path = folder / "meta.json"
    try:
        meta = read_json(path)
        if isinstance(meta, dict) and meta.get("complete") is False:
            raise UserError(
                f"{path} says that `python -m mingpt prepare` was interrupted: remove the folder {folder} "
                "and run the same command again, unless it still runs"
            )
        check_json(meta, Meta)
    except FileNotFoundError:
        return None
    except (OSError, BadJson) as error:
        raise UserError(
            f"{path} is damaged: {error}; prepare the data again, or rename it to read the shards without it"
        ) from None
    checked: dict[str, Any] = meta
    return checked
