"""From the files that the command names to the tokens that the shards hold.

Files come in a fixed order; a text file is one document, so is each line of .jsonl or row of .parquet. The
training part comes first, then the validation part: the documents of the tail by count of bytes, none of them
cut; of a single document the tail of its characters. Documents come in batches of texts to encode, each known
by where it begins, so that work can go on there. End-of-text stands behind each document.
"""

import codecs
import contextlib
import glob
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import fsspec
import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.urls import redact
from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer
from mingpt.data.source import COMPRESSED, KINDS, readable

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
ROWS_AT_ONCE = 64
KEY = "text"
PIECE_CHARACTERS = 1 << 14
GROUP_BYTES = 1 << 20  # encoded at once; the package needs about 100 bytes for a token meanwhile
BATCH_CHARACTERS = 1 << 21
SHORTEST_CUT = 1 << 16  # characters


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


@dataclass(frozen=True)
class Piece:
    """Some of a document's text. Reading goes on behind it at `offset` (bytes) or `row`."""

    text: str
    ends_document: bool
    offset: int
    row: int  # lines of .jsonl or rows of .parquet so far


def read_pieces(file: InputFile, offset: int = 0, row: int = 0) -> Iterator[Piece]:
    """The pieces of a file from a place where one ended. Always the same pieces from the same place.

    Only a text file's document comes in several. Raises UserError naming file and place for what is no text.
    """
    if file.kind == "text":
        return read_text(file, offset)
    return read_jsonl(file, offset, row) if file.kind == "jsonl" else read_parquet(file, row)


def read_text(file: InputFile, offset: int) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with open_input(file, offset) as stream:
        while True:
            content = read_fully(stream, PIECE_BYTES)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(content, final=not content)
            except UnicodeDecodeError as error:
                byte, place = error.object[error.start], offset - pending + error.start
                raise UserError(f"{file.shown} is not UTF-8: byte 0x{byte:02x} at offset {place:,}") from None
            offset += len(content)
            yield Piece(text, not content, offset - len(decoder.getstate()[0]), 0)
            if not content:
                return


def read_fully(stream: Any, size: int) -> bytes:
    """`size` bytes, fewer only at the end: network drivers return what has arrived."""
    content: bytes = stream.read(size)
    while 0 < len(content) < size:
        more = stream.read(size - len(content))
        if not more:
            break
        content += more
    return content


def read_jsonl(file: InputFile, offset: int, row: int) -> Iterator[Piece]:
    with open_input(file, offset) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            row += 1
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"line {row:,} of {file.shown} is longer than {MAX_LINE_BYTES >> 20} MiB: give so long a "
                    "document as a text file"
                )
            offset += len(line)
            if line.strip():
                yield Piece(parse_line(line, f"line {row:,} of {file.shown}"), True, offset, row)


def parse_line(line: bytes, place: str) -> str:
    """The text of a document. Raises UserError, which begins with `place`."""
    try:
        document = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise UserError(f"{place} is not UTF-8: byte 0x{line[error.start]:02x}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from None
    return checked_text(document.get(KEY) if isinstance(document, dict) else None, place)


def checked_text(text: object, place: str) -> str:
    """Raises UserError, which begins with `place`, for what is not a valid text."""
    if not isinstance(text, str):
        raise UserError(f'{place} has no text under "{KEY}"')
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise UserError(f"{place} holds a lone surrogate (U+{code:04X}), which is no text") from None
    return text


def read_parquet(file: InputFile, row: int) -> Iterator[Piece]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise UserError(
            f"{file.shown} needs the package pyarrow, which cannot be imported ({error}): pip install pyarrow"
        ) from None
    with open_input(file) as stream:
        table = parquet.ParquetFile(stream, buffer_size=PIECE_BYTES)
        if KEY not in table.schema_arrow.names:
            columns = ", ".join(table.schema_arrow.names)
            raise UserError(f'{file.shown} has no column "{KEY}"; it has {columns}')
        first = 0
        for group in range(table.num_row_groups):
            rows = table.metadata.row_group(group).num_rows
            if row < first + rows:
                for text in read_group(table, group, row - first):
                    row += 1
                    yield Piece(checked_text(text, f"row {row:,} of {file.shown}"), True, 0, row)
            first += rows


def read_group(table: Any, group: int, skip: int) -> Iterator[object]:
    """The values of the text column in a group of rows, but for the first `skip`."""
    for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, row_groups=[group], columns=[KEY]):
        yield from batch.column(0).slice(skip).to_pylist()
        skip = max(0, skip - batch.num_rows)


@dataclass
class InputStats:
    """What the documents are in all."""

    documents: int = 0
    bytes: int = 0  # of UTF-8
    characters: int = 0
    alphabet: str = ""  # the distinct characters in code-point order, where they are asked for


class Counter:
    """Counts pieces of documents into InputStats."""

    def __init__(self, wants_alphabet: bool) -> None:
        self.stats = InputStats()
        self._seen = np.zeros(0x110000, dtype=bool) if wants_alphabet else None

    def add(self, piece: Piece) -> int:
        """Returns the piece's bytes."""
        size = utf8_length(piece.text)
        self.stats.documents += piece.ends_document
        self.stats.bytes += size
        self.stats.characters += len(piece.text)
        if self._seen is not None:
            self._seen[np.frombuffer(piece.text.encode("utf-32-le"), dtype=np.uint32)] = True
        return size

    def result(self) -> InputStats:
        if self._seen is not None:
            self.stats.alphabet = "".join(map(chr, np.flatnonzero(self._seen)))
        return self.stats


def utf8_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


class Encoder:
    """A tokenizer as this command uses it. Threads may share one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_of_text = tokenizer.end_of_text
        self.dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        self.can_be_cut = isinstance(tokenizer, CharTokenizer) or (
            isinstance(tokenizer, JsonTokenizer) and tokenizer.can_be_cut
        )

    def split(self, text: str) -> list[str]:
        """The text in pieces with, one after the other, its tokens; the last one may go on behind the text.

        One piece where `can_be_cut` is false, none for an empty text.
        """
        if isinstance(self.tokenizer, JsonTokenizer):
            return list(self.tokenizer.split_text(text, PIECE_CHARACTERS))
        return [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]

    def encode(self, texts: Sequence[str], ends: Sequence[bool]) -> np.ndarray:
        """(tokens,) of all texts, with end-of-text, where there is one, after those that `ends` marks."""
        arrays = self.encode_each(texts)
        if self.end_of_text is not None:
            end = np.array([self.end_of_text], dtype=self.dtype)
            arrays = [
                part
                for tokens, ends_document in zip(arrays, ends, strict=True)
                for part in ((tokens, end) if ends_document else (tokens,))
            ]
        return np.concatenate(arrays, dtype=self.dtype, casting="same_kind")

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray]:
        if isinstance(self.tokenizer, CharTokenizer):
            return [self.tokenizer.encode("".join(texts))]  # there is no end-of-text to go between them
        if not isinstance(self.tokenizer, JsonTokenizer):
            return [self.tokenizer.encode(text) for text in texts]
        arrays = list[np.ndarray]()
        for group in groups(texts):
            arrays += self.tokenizer.encode_batch(group)
        return arrays

    def first_token_bytes(self, text: str, token: int) -> int:
        """The UTF-8 bytes of `text`, which begins with `token`, that this first token covers."""
        lengths = self.tokenizer.token_bytes()
        if token == self.end_of_text:
            return 0
        if lengths is not None:
            return int(lengths[token])
        from tokenizers import Tokenizer as PackageTokenizer

        package = PackageTokenizer.from_str((self.tokenizer.to_tokenizer_json() or b"").decode())
        package.encode_special_tokens = True
        offsets: list[tuple[int, int]] = package.encode(text, add_special_tokens=False).offsets
        return len(text[: offsets[0][1]].encode()) if offsets else 0


def groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, about GROUP_BYTES at a time."""
    first, size = 0, 0
    for place, text in enumerate(texts):
        size += utf8_length(text)
        if size >= GROUP_BYTES:
            yield texts[first : place + 1]
            first, size = place + 1, 0
    if first < len(texts):
        yield texts[first:]


def content_of(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.json. Raises UserError for a tokenizer that has none."""
    content = tokenizer.to_tokenizer_json()
    if content is None:
        raise UserError(f"a {type(tokenizer).__name__} cannot be written as a tokenizer.json")
    return content


@dataclass(frozen=True)
class Position:
    """A place in the input from which reading can go on."""

    file: int = 0
    offset: int = 0  # bytes in the decompressed file: all before, or where the line at hand begins
    row: int = 0  # lines or rows before
    document: int = 0  # documents before
    start: int = 0  # bytes of text in the documents before
    characters: int = 0  # of this document before here
    bytes: int = 0  # of this document before here


@dataclass(frozen=True)
class Split:
    """Where validation begins. Depends on the documents and `val_fraction` alone."""

    stats: InputStats
    val_fraction: float

    @property
    def characters(self) -> int | None:
        """Of a single document, those that are trained on; None where there are several documents."""
        if self.stats.documents > 1:
            return None
        return int(self.stats.characters * (1 - self.val_fraction))

    def is_val(self, position: Position) -> bool:
        """Whether the text at a position belongs to the validation part."""
        if self.characters is not None:
            return position.characters >= self.characters
        first_byte = int(self.stats.bytes * (1 - self.val_fraction))
        is_last = position.document == self.stats.documents - 1
        return position.document > 0 and (position.start >= first_byte or is_last)


@dataclass(frozen=True)
class Batch:
    """Texts from `before` to `after`, all of one part."""

    before: Position
    after: Position
    is_val: bool
    texts: list[str]
    ends: list[bool]  # whether a document ends behind the text

    @property
    def bytes(self) -> int:
        """Of text."""
        return self.after.start + self.after.bytes - self.before.start - self.before.bytes


def read_batches(
    files: Sequence[InputFile], split: Split, encoder: Encoder, position: Position
) -> Iterator[Batch]:
    """The input from a position on. Encoded one by one, batches have the tokens of whole documents."""
    batch: Batch | None = None
    size = 0
    for segment in read_segments(files, split, encoder, position):
        if batch and (size >= BATCH_CHARACTERS or batch.is_val != segment.is_val):
            yield batch
            batch, size = None, 0
        size += sum(map(len, segment.texts))
        if batch:
            batch.texts.extend(segment.texts)
            batch.ends.extend(segment.ends)
            batch = replace(batch, after=segment.after)
        else:
            batch = segment
    if batch:
        yield batch


def read_segments(
    files: Sequence[InputFile], split: Split, encoder: Encoder, position: Position
) -> Iterator[Batch]:
    """The shortest batches: as much of a document as can be encoded apart from what follows it."""
    for number in range(position.file, len(files)):
        is_text = files[number].kind == "text"
        document = Document(split, encoder, position, is_text)
        skip = 0 if is_text else position.characters  # the line is read again from its beginning
        for piece in read_pieces(files[number], position.offset, position.row):
            yield from document.add(piece.text[skip:])
            skip = 0
            if piece.ends_document:
                end = {"file": number + 1} if is_text else {"offset": piece.offset, "row": piece.row}
                yield document.finish(**end)
        position = Position(number + 1, document=document.at.document, start=document.at.start)


class Document:
    """Cuts a document's pieces into segments while they come, and knows the position of each."""

    def __init__(self, split: Split, encoder: Encoder, at: Position, is_text: bool) -> None:
        self.split, self.encoder, self.is_text = split, encoder, is_text
        self.at = at  # the end of the last segment
        self.hold("")

    def add(self, text: str) -> Iterator[Batch]:
        """The segments that are complete with a further piece."""
        self.pending.append(text)
        self.length += len(text)
        split_at = self.split.characters
        if split_at is not None and self.at.characters < split_at <= self.at.characters + self.length:
            text = "".join(self.pending)
            head = text[: split_at - self.at.characters]
            self.hold(text[len(head) :])
            yield self.segment(self.encoder.split(head), ends=False)
        if self.encoder.can_be_cut and self.length > self.next_cut:
            *texts, rest = self.encoder.split("".join(self.pending)) or [""]
            self.hold(rest)
            if texts:
                yield self.segment(texts, ends=False)

    def hold(self, rest: str) -> None:
        """Keep what is not in a segment yet, until it has grown enough to be searched for a cut again."""
        self.pending, self.length = [rest], len(rest)
        self.next_cut = max(SHORTEST_CUT, 2 * len(rest))

    def finish(self, **end: int) -> Batch:
        """The document's last segment; the next document begins at `end`."""
        texts = self.encoder.split("".join(self.pending)) or [""]
        self.hold("")
        segment = self.segment(texts, ends=True)
        after = Position(self.at.file, document=self.at.document + 1, start=self.at.start + self.at.bytes)
        self.at = replace(after, **end)
        return replace(segment, after=self.at)

    def segment(self, texts: list[str], ends: bool) -> Batch:
        before, size = self.at, sum(map(utf8_length, texts))
        self.at = replace(
            before,
            offset=before.offset + (size if self.is_text else 0),
            characters=before.characters + sum(map(len, texts)),
            bytes=before.bytes + size,
        )
        last = len(texts) - 1
        marks = [ends and place == last for place in range(len(texts))]
        return Batch(before, self.at, self.split.is_val(before), texts, marks)
