"""Check a folder of token shards, which are files of tokens, and read windows as if the files were one array.

There are two formats. Files of nanoGPT, train.bin and val.bin, have little-endian uint16 tokens and no
header. Files of llm.c and modded-nanogpt have a header of 256 int32, which begins with magic, version and
number of tokens; uint16 or uint32 tokens follow. `python -m mingpt prepare` describes its shards in a
meta.json beside them. A meta.json is checked before it is used.

No file is mapped into memory. Otherwise resident memory would grow with the data, and a signal would end the
process if a mapped file became shorter.
"""

import bisect
import glob
import hashlib
import itertools
import os
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic

from mingpt.base.errors import ExpectedError, UserError
from mingpt.base.files import BadJson, Count, Sha256, check_json, read_json, reason_of
from mingpt.data.source import relative_to
from mingpt.data.tokenizers import Tokenizer

GPT2_VOCABULARY = 50257  # tokens; for shards without a tokenizer
HEADER_BYTES = 1024
UINT16: np.dtype[Any] = np.dtype("<u2")
UINT32: np.dtype[Any] = np.dtype("<u4")
FORMATS = {(20240520, 1): UINT16, (20240801, 7): UINT32}  # magic and version: type of a token
HEADERLESS = ("train.bin", "val.bin")
BLOCK_BYTES = 4096  # a fingerprint (a hash) covers a file's first block, its last and two between them
VALIDATION = re.compile(r"(?i)(?<![^\W\d_])val(id|idation)?(?![^\W\d_])")  # not in medieval or eval


class TokenizerMeta(pydantic.BaseModel):
    sha256: Sha256 | None
    vocab_size: pydantic.PositiveInt


class FileMeta(pydantic.BaseModel):
    name: str
    sha256: Sha256


class Meta(pydantic.BaseModel):
    """The fields of a finished meta.json that this program uses; other fields are ignored."""

    format: Literal[1]
    complete: Literal[True]
    val_bytes: Count | None  # UTF-8 bytes of the validation text; None if not known
    tokenizer: TokenizerMeta
    files: list[FileMeta]


@dataclass(frozen=True)
class ShardFile:
    """A checked file of `size` bytes, with `tokens` tokens of type `dtype` from byte `offset` on.

    `fingerprint` is a hash of the file's name, its size, some blocks of its content, and its SHA-256 in
    meta.json, if any.
    """

    path: Path
    size: int
    tokens: int
    offset: int
    dtype: np.dtype[Any]
    fingerprint: str


def inspect(path: Path, entry: FileMeta | None) -> ShardFile:
    """Check a file's header and size; return its layout and fingerprint as a ShardFile.

    `entry` is the file's entry in meta.json; None if there is no meta.json. The entry's SHA-256 is not
    compared with the file, but is part of the fingerprint. Raises UserError, which names the file, if the
    file cannot be read or used.
    """
    if not os.path.isfile(path):  # opening a pipe might wait forever
        raise UserError(f"{path} is not a regular file")
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            last = size - BLOCK_BYTES
            # In a small file the blocks overlap.
            places = [last * part // 3 for part in range(4 if last > 0 else 1)]
            content = b"".join(os.pread(file.fileno(), BLOCK_BYTES, place) for place in places)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {reason_of(error)}") from None
    magic, version, tokens = struct.unpack("<2iI", content[:12].ljust(12, b"\0"))
    dtype, offset = FORMATS.get((magic, version)), HEADER_BYTES
    if dtype is None and path.name in HEADERLESS:
        dtype, offset, tokens = UINT16, 0, size // UINT16.itemsize
    if dtype is None:
        raise UserError(
            f"{path} has {size:,} bytes, begins with {magic} and version {version}, and token shards begin "
            f"with {' or '.join(str(known) for known, _ in FORMATS)}: if it holds nanoGPT's tokens, name it "
            f"{' or '.join(HEADERLESS)}; otherwise move it to another folder"
        )
    expected = offset + tokens * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size:,} bytes, and {tokens:,} tokens with their header take {expected:,}: copy it "
            "again"
        )
    fingerprint = hashlib.sha256(b"%b\0%d\0" % (os.fsencode(path.name), size) + content).hexdigest()
    if entry is not None:
        fingerprint = hashlib.sha256((entry.sha256 + fingerprint).encode()).hexdigest()
    return ShardFile(path, size, tokens, offset, dtype, fingerprint)


def read_meta(folder: Path) -> Meta | None:
    """Return the checked content of the folder's meta.json; None if there is no such file.

    Raises UserError if the file cannot be read, does not have the form of `Meta`, or says that `prepare` did
    not finish.
    """
    path = folder / "meta.json"
    try:
        meta = read_json(path)
        if isinstance(meta, dict) and meta.get("complete") is False:
            raise UserError(
                f"{path} says that `python -m mingpt prepare` was interrupted: remove the folder {folder} "
                "and run the same command again, unless it still runs"
            )
        return check_json(meta, Meta)
    except FileNotFoundError:
        return None
    except (OSError, BadJson) as error:
        raise UserError(
            f"{path} is damaged: {error}; prepare the data again, or rename it to read the shards without it"
        ) from None


class TokenShards:
    """The tokens `first` to `stop` - 1 of the concatenated `files`, as an array that is read in windows.

    A file is open only while tokens are read from it, so any thread or forked process may call `read`.
    """

    def __init__(self, files: Sequence[ShardFile], first: int, stop: int) -> None:
        self._files, self._first, self._stop = files, first, stop
        self._borders = [0, *itertools.accumulate(file.tokens for file in files)]  # tokens before each file

    def __len__(self) -> int:
        return self._stop - self._first

    def read(self, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Return the `length` tokens from each of `starts` on, (len(starts), length) int64.

        A window may extend over several files. Raises IndexError if a window is not within the array. Raises
        ExpectedError if a file cannot be read or has changed its size since the file was checked.
        """
        first = np.asarray(starts, dtype=np.int64) + self._first
        last = first + length
        if ((first < self._first) | (last > self._stop)).any():
            raise IndexError(f"windows of {length} from {list(starts)} do not all lie in {len(self)} tokens")
        windows = np.empty((len(first), length), dtype=np.int64)
        spans = [(self._file_at(low), self._file_at(high - 1)) for low, high in zip(first, last, strict=True)]
        for number in sorted({number for low, high in spans for number in range(low, high + 1)}):
            file, begin, end = self._files[number], *self._borders[number : number + 2]
            try:
                with open(file.path, "rb") as stream:
                    if os.fstat(stream.fileno()).st_size != file.size:
                        raise ExpectedError(f"{file.path} has changed its size while it was in use")
                    for row in np.flatnonzero((first < end) & (last > begin)):
                        low, high = max(first[row], begin), min(last[row], end)
                        place = file.offset + (low - begin) * file.dtype.itemsize
                        content = os.pread(stream.fileno(), (high - low) * file.dtype.itemsize, place)
                        tokens = np.frombuffer(content, file.dtype)
                        windows[row, low - first[row] : high - first[row]] = tokens
            except OSError as error:
                raise ExpectedError(f"{file.path} cannot be read: {reason_of(error)}") from None
        return windows

    def where(self, position: int) -> str:
        """Return the place of the token at `position`, for an error message: "token 7 of FILE"."""
        number = self._file_at(position + self._first)
        token = position + self._first - self._borders[number]
        return f"token {token:,} of {self._files[number].path}"

    def _file_at(self, position: int) -> int:
        return bisect.bisect_right(self._borders, position) - 1


@dataclass(frozen=True)
class ShardData:
    """Checked token shards, split into a training part, `train`, and a validation part, `val`.

    `files` is {file's name: its fingerprint (a hash)}: the files for training, sorted by name, then those for
    validation, sorted by name. `fingerprint` is the SHA-256, in hex, over all these fingerprints. `meta` is
    the content of the folder's meta.json, or None if there is no such file.
    """

    folder: Path  # where a tokenizer.json may lie
    meta: Meta | None
    fingerprint: str
    files: dict[str, str]
    train: TokenShards
    val: TokenShards

    def train_tokenizer(self, name: str) -> None:
        """Return None, because no tokenizer can be made from token shards.

        Raises UserError if `name`, which is data.tokenizer, is not auto.
        """
        if name != "auto":
            raise UserError(
                f"data.tokenizer={name} is made from a text, and data.path {self.folder} holds token shards: "
                "give the tokenizer.json that they were made with"
            )

    def check_tokenizer(self, tokenizer: Tokenizer | None, name: str) -> None:
        """Raise UserError if meta.json says that the shards were made with a different tokenizer.json.

        `name` is data.tokenizer, for the message. Nothing is checked if `tokenizer` is None or has no
        tokenizer.json, or if no meta.json says with which tokenizer the shards were made.
        """
        content = tokenizer.to_tokenizer_json() if tokenizer else None
        made_with = self.meta.tokenizer.sha256 if self.meta else None
        if content and made_with and hashlib.sha256(content).hexdigest() != made_with:
            raise UserError(
                f"the token shards in {self.folder} were prepared with another tokenizer than "
                f"data.tokenizer={name}: leave that at auto, with their tokenizer.json beside them"
            )

    def encode(self, tokenizer: Tokenizer | None) -> tuple[TokenShards, TokenShards, int, int | None]:
        """Return (training part, validation part, vocabulary size, the validation text's size in bytes).

        If `tokenizer` is None, the vocabulary size comes from meta.json; without a meta.json it is GPT-2's.
        The text's size is None if it is not known.
        """
        size, val_bytes = GPT2_VOCABULARY, None
        if self.meta:
            size, val_bytes = self.meta.tokenizer.vocab_size, self.meta.val_bytes
        return self.train, self.val, size if tokenizer is None else len(tokenizer), val_bytes


def open_shards(folder: Path, val_fraction: float) -> ShardData:
    """Return the token shards in a folder, which are its .bin files: checked, sorted and split.

    Files with the lower-case word val, valid or validation in their names are for validation. If no file has
    such a name, the last `val_fraction` of all tokens is for validation.

    Raises UserError if the files or their meta.json cannot be used, if there is no file for training, or if
    the folder does not have exactly the .bin files that its meta.json lists.
    """
    meta = read_meta(folder)
    names = glob.glob("*.bin", root_dir=folder)
    entries = {entry.name: entry for entry in meta.files} if meta else {}
    different = sorted(entries.keys() ^ set(names)) if meta else []
    if different:
        raise UserError(
            f"{folder / different[0]} is missing, or is not in {folder / 'meta.json'}: copy it there, move "
            "it to another folder, or prepare the data again"
        )
    train_names = sorted(name for name in names if not VALIDATION.search(name))
    val_names = sorted(set(names) - set(train_names))
    if not train_names:
        raise UserError(
            f"data.path {folder} has no file for training, whose name ends in .bin and lacks the word val"
            f"{relative_to(str(folder))}: name a text, or a folder of token shards, which `python -m mingpt "
            "prepare` makes of other files"
        )
    files = [inspect(folder / name, entries.get(name)) for name in (*train_names, *val_names)]
    total = sum(file.tokens for file in files)
    n_train = sum(file.tokens for file in files[: len(train_names)])
    if not val_names:
        n_train = int(total * (1 - val_fraction))
    digests = {file.path.name: file.fingerprint for file in files}
    return ShardData(
        folder,
        meta,
        hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        digests,
        TokenShards(files, 0, n_train),
        TokenShards(files, n_train, total),
    )
