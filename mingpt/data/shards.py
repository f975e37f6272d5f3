"""Find and check token shards, which are files of tokens, and read windows as if the files were one array.

There are two formats. Files of nanoGPT, train.bin and val.bin, have little-endian uint16 tokens and no
header. Files of llm.c and modded-nanogpt have a header of 256 int32, which begins with magic, version and
number of tokens; uint16 or uint32 tokens follow. `python -m mingpt prepare` describes its shards in a
meta.json beside them. A meta.json is checked before it is used.

No file is mapped into memory. Otherwise resident memory would grow with the data, and a signal would end the
process if a mapped file became shorter.
"""

import bisect
import contextlib
import glob
import hashlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

import numpy as np
import pydantic

from mingpt.base.errors import ExpectedError, UserError
from mingpt.base.files import BadJson, Count, Sha256, check_json, read_json, reason_of
from mingpt.data.source import relative_to
from mingpt.data.tokenizers import Tokenizer

LOCAL = ("file://", "local://")
GPT2_VOCABULARY = 50257  # tokens; for shards without a tokenizer
HEADER_BYTES = 1024
UINT16: np.dtype[Any] = np.dtype("<u2")
UINT32: np.dtype[Any] = np.dtype("<u4")
FORMATS = {(20240520, 1): UINT16, (20240801, 7): UINT32}  # magic and version: type of a token
HEADERLESS = ("train.bin", "val.bin")
BLOCK_BYTES = 4096  # a fingerprint (a hash) covers a file's first block, its last and two between them
SAMPLE_BYTES = 16384  # bytes from the middle of a file that show the type of its tokens
MIN_NONZERO = 128  # nonzero tokens; one in 2^128 files of uint16 has all of them at even places by chance
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
    val_bytes: Count | None  # UTF-8 bytes of the validation text; None if not known
    tokenizer: TokenizerMeta
    files: Annotated[list[FileMeta], pydantic.Field(min_length=1)]


@dataclass(frozen=True)
class ShardFile:
    """A checked file of `size` bytes, with `tokens` tokens of type `dtype` from byte `offset` on.

    `fingerprint` is a hash of the file's name, its size, some blocks of its content, and its SHA-256 in
    meta.json, if any.
    """

    path: str
    size: int
    tokens: int
    offset: int
    dtype: np.dtype[Any]
    fingerprint: str


def is_shards(path: str) -> bool:
    """Return whether `path`, a data.path, names token shards: a folder, a pattern, or a name ending in .bin.

    A URL other than file:// or local:// is judged only by its name. A local path with *, ? or [ is not a
    pattern if a file has exactly this name.
    """
    local = local_path(path)
    if local is None:
        scheme, _, rest = path.partition("://")
        if scheme in ("http", "https"):
            rest = rest.partition("/")[2].partition("?")[0]  # a host may be [::1]
        return rest.endswith(".bin") or has_pattern(rest)
    if os.path.isdir(local):
        return True
    return local.endswith(".bin") or (has_pattern(local) and not os.path.lexists(local))


def local_path(path: str) -> str | None:
    """Return the path, with ~ expanded, of a local path or a file:// or local:// URL; None for other URLs."""
    for scheme in LOCAL:
        path = path.removeprefix(scheme)
    return None if "://" in path else os.path.expanduser(path)


def find_files(path: str) -> list[Path]:
    """Return the files that `path` stands for: .bin files of a folder or a pattern, sorted, or one file.

    If `path` is neither a folder nor a pattern, the file need not exist. Raises UserError if a folder or
    pattern has no .bin file, or if the files of a pattern are in several folders.
    """
    if os.path.isdir(path):
        pattern = f"{glob.escape(path)}/*.bin"
    elif os.path.lexists(path) or not has_pattern(path):
        return [Path(path)]
    else:
        pattern = path
    found = sorted(Path(name) for name in glob.glob(pattern) if name.endswith(".bin"))
    if not found:
        read_meta(Path(path))  # raises an error if prepare was interrupted before the first shard
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
    """Return whether a name has `val`, `valid` or `validation` in lower case, not beside another letter."""
    return VALIDATION.search(name) is not None


def inspect(path: str, entry: Mapping[str, Any] | None) -> ShardFile:
    """Check a file's header, type and size; return its layout and fingerprint as a ShardFile.

    `entry` is the file's entry in meta.json; None if there is no such entry. The entry's numbers of tokens
    and bytes must equal the file's. The entry's SHA-256 is not compared with the file, but is part of the
    fingerprint. Raises UserError, which names the file, if the file cannot be read or used.
    """
    if not os.path.isfile(path):  # opening a pipe might wait forever
        raise UserError(f"{path} does not exist, or is not a regular file{relative_to(path)}")
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

    `header` has the file's first HEADER_BYTES bytes. `size` is the file's length in bytes, and is not
    compared with the header. If a file named in HEADERLESS does not begin with a known magic number, it has
    only uint16 tokens. For any other unknown header, raises UserError, which names the file.
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
    """Raise UserError if a file that would be read as uint16 seems to hold tokens of 4 or 8 bytes.

    `sample` has bytes from the middle of the file.
    """
    low, high = np.frombuffer(sample, UINT16).reshape(-1, 2).T
    if np.count_nonzero(low) >= MIN_NONZERO and high.sum() * 4096 <= low.sum():
        raise UserError(
            f"{path} seems to hold tokens of 4 or 8 bytes, and would be read as uint16: write it as uint32 "
            "after llm.c's header, 256 int32 that begin with 20240801, 7 and the number of tokens"
        )


def read_meta(folder: Path) -> dict[str, Any] | None:
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
        check_json(meta, Meta)
    except FileNotFoundError:
        return None
    except (OSError, BadJson) as error:
        raise UserError(
            f"{path} is damaged: {error}; prepare the data again, or rename it to read the shards without it"
        ) from None
    checked: dict[str, Any] = meta
    return checked


@contextlib.contextmanager
def open_unchanged(file: ShardFile) -> Iterator[BinaryIO]:
    """Open a checked file for a `with` block.

    An OSError raised by opening the file, or within the block, becomes a UserError if the file is gone or may
    not be read. Any other OSError becomes an ExpectedError, because the failure may be temporary. Also raises
    UserError if the size of the file has changed since the check.
    """
    try:
        with open(file.path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != file.size:
                raise UserError(
                    f"{file.path} has changed while it was in use, from {file.size:,} bytes to {size:,}: put "
                    "back the file that the run began with"
                )
            yield stream
    except (FileNotFoundError, PermissionError) as error:
        sentence = f"{file.path} cannot be read: {error.strerror}; it was there when the run began"
        raise UserError(sentence) from None
    except OSError as error:
        raise ExpectedError(f"{file.path} cannot be read: {error.strerror}") from None


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

        A window may extend over several files. Raises IndexError for a window that is not all in the array.
        Raises UserError if a file is gone, may not be read or has changed its size since the check. Raises
        ExpectedError for any other OSError.
        """
        first = np.asarray(starts, dtype=np.int64) + self._first
        last = first + length
        if ((first < self._first) | (last > self._stop)).any():
            raise IndexError(f"windows of {length} from {list(starts)} do not all lie in {len(self)} tokens")
        windows = np.empty((len(first), length), dtype=np.int64)
        files = {number for pair in zip(first, last, strict=True) for number in self._files_of(*pair)}
        for number in sorted(files):
            file, begin, end = self._files[number], *self._borders[number : number + 2]
            with open_unchanged(file) as stream:
                for row in np.flatnonzero((first < end) & (last > begin)):
                    low, high = max(first[row], begin), min(last[row], end)
                    stream.seek(file.offset + (low - begin) * file.dtype.itemsize)
                    content = stream.read((high - low) * file.dtype.itemsize)
                    windows[row, low - first[row] : high - first[row]] = np.frombuffer(content, file.dtype)
        return windows

    def where(self, position: int) -> str:
        """Return the place of the token at `position`, for an error message: "token 7 of FILE"."""
        number = self._file_at(position + self._first)
        token = position + self._first - self._borders[number]
        return f"token {token:,} of {self._files[number].path}"

    def _files_of(self, first: int, stop: int) -> range:
        return range(self._file_at(first), self._file_at(stop - 1) + 1)

    def _file_at(self, position: int) -> int:
        return bisect.bisect_right(self._borders, position) - 1


@dataclass(frozen=True)
class ShardData:
    """Checked token shards, split into a training and a validation part; the methods are those of `TextData`.

    `files` is {file's name: its fingerprint (a hash)}, in the order of reading; `fingerprint` is the SHA-256,
    in hex, over all these fingerprints. `meta` is the content of the folder's meta.json, or None if there is
    no such file. The entry `val_bytes` of `meta` is None if the files that are read are not exactly those
    that meta.json lists.
    """

    path: str
    fingerprint: str
    files: dict[str, str]
    train: TokenShards
    val: TokenShards
    folder: Path  # where a tokenizer.json may lie
    meta: dict[str, Any] | None

    def train_tokenizer(self, name: str) -> None:
        """Return None, because token shards need no tokenizer.

        Raises UserError if `name`, which is data.tokenizer, is not auto.
        """
        if name != "auto":
            raise UserError(
                f"data.tokenizer={name} is made from a text, and data.path {self.path} holds token shards: "
                "give the tokenizer.json that they were made with"
            )

    def check_tokenizer(self, tokenizer: Tokenizer | None, name: str) -> None:
        """Raise UserError if meta.json says that the shards were made with a different tokenizer.

        `name` is data.tokenizer, for the message. Nothing is checked if `tokenizer` is None or has no
        tokenizer.json, or if no meta.json says with which tokenizer the shards were made.
        """
        content = tokenizer.to_tokenizer_json() if tokenizer else None
        made_with = self.meta["tokenizer"]["sha256"] if self.meta else None
        if content and made_with and hashlib.sha256(content).hexdigest() != made_with:
            raise UserError(
                f"the token shards in {self.path} were prepared with another tokenizer than "
                f"data.tokenizer={name}: leave that at auto, with their tokenizer.json beside them"
            )

    def encode(self, tokenizer: Tokenizer | None) -> tuple[TokenShards, TokenShards, int, int | None]:
        """Return (training part, validation part, size of the vocabulary, number of validation bytes).

        If `tokenizer` is None, the size comes from meta.json; without a meta.json it is GPT-2's. The number
        of bytes is None if it is not known.
        """
        size, val_bytes = GPT2_VOCABULARY, None
        if self.meta:
            size, val_bytes = self.meta["tokenizer"]["vocab_size"], self.meta["val_bytes"]
        return self.train, self.val, size if tokenizer is None else len(tokenizer), val_bytes


def open_shards(path: str, val_fraction: float) -> ShardData:
    """Return the token shards of `path`, a folder, a pattern or one .bin file: checked, sorted and split.

    Files with the word val, valid or validation in their names are for validation. If no file has such a
    name, the last `val_fraction` of all tokens is for validation.

    Raises UserError for a remote URL, and if the files or their meta.json cannot be used. Also raises
    UserError if all files are for validation, or if a folder does not have exactly the files that its
    meta.json lists.
    """
    local = local_path(path)
    if local is None:
        raise UserError(f"data.path {path} names token shards at a URL: copy them to a local or shared disk")
    found = find_files(local)
    folder, names = found[0].parent, [file.name for file in found]
    meta = read_meta(folder)
    entries = {entry["name"]: entry for entry in meta["files"]} if meta else {}
    if meta and os.path.isdir(local):
        check_listed(folder, names, entries)
    if meta and set(names) != entries.keys():
        meta = meta | {"val_bytes": None}
    names = sorted(names, key=lambda name: (is_validation(name), name))
    n_train_files = sum(not is_validation(name) for name in names)
    if not n_train_files:
        raise UserError(
            f"data.path {path} has only validation files, such as {folder / names[0]}: files whose names "
            "lack the word val are needed for training"
        )
    files = [inspect(str(folder / name), entries.get(name)) for name in names]
    total = sum(file.tokens for file in files)
    by_name = n_train_files < len(files)
    n_train = (
        sum(file.tokens for file in files[:n_train_files]) if by_name else int(total * (1 - val_fraction))
    )
    digests = {name: file.fingerprint for name, file in zip(names, files, strict=True)}
    return ShardData(
        path,
        hashlib.sha256("".join(digests.values()).encode()).hexdigest(),
        digests,
        TokenShards(files, 0, n_train),
        TokenShards(files, n_train, total),
        folder,
        meta,
    )


def check_listed(folder: Path, names: Sequence[str], entries: dict[str, Any]) -> None:
    """Raise UserError if `names`, the shards in the folder, are not exactly the keys of `entries`.

    The keys are the names of the files that meta.json lists.
    """
    different = sorted(entries.keys() ^ set(names))
    if different:
        raise UserError(
            f"{folder / different[0]} is missing, or is not in {folder / 'meta.json'}: copy it there, move "
            "it to another folder, or prepare the data again"
        )
