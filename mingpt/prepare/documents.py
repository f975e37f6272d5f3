"""The documents of a file, in pieces: a text file is one, so is each line of .jsonl or row of .parquet."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mingpt.errors import UserError
from mingpt.prepare.inputs import InputFile, open_input

PIECE_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
ROWS_AT_ONCE = 64
KEY = "text"


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
