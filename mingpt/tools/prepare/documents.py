"""Read documents from files, split them into training and validation, and encode them to tokens.

Files are read in a fixed order. A text file is one document; so is each line of .jsonl or row of .parquet.
The validation part is the last documents, by count of bytes, or the last characters of a single document.
Texts come in batches. A text file larger than PIECE_BYTES is encoded in pieces that end before a line end. If
the tokenizer has an end-of-text, it follows each document.
"""

import contextlib
import glob
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import pydantic

from mingpt.base.errors import UserError
from mingpt.base.files import check_json, decode_text, parse_json
from mingpt.base.paths import refuse_pipe
from mingpt.base.urls import redact
from mingpt.data.source import COMPRESSED, KINDS, readable
from mingpt.data.tokenizers import Tokenizer

PIECE_BYTES = 1 << 17  # size of a long text's pieces, which `tokenizers` encodes in parallel
BATCH_BYTES = 1 << 21  # encoded at once; `tokenizers` needs about 100 bytes for a token meanwhile
READ_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
ROWS_AT_ONCE = 64
KEY = "text"
# Unicode's White_Space. GPT-2's pattern begins a word wherever whitespace follows another character.
BLANKS = (
    " \t\n\v\f\r\x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u2028\u2029"
    "\u202f\u205f\u3000"
)


@dataclass(frozen=True)
class InputFile:
    """A file to read, by path or URL."""

    path: str
    kind: str  # text, jsonl or parquet

    @property
    def shown(self) -> str:
        """The file's path or URL without credentials."""
        return redact(self.path)


def find_inputs(names: Sequence[str]) -> list[InputFile]:
    """Return the files of `names` in order, a pattern's sorted. UserError if one is missing or a folder."""
    found = [make_input(path) for name in names for path in expand(name)]
    if not found:
        raise UserError("there is no text: name at least one file, pattern or URL")
    return found


def expand(name: str) -> list[str]:
    """Return the paths that a name stands for: itself, or what its pattern matches. UserError if none do."""
    is_literal = name.startswith(("http://", "https://")) or os.path.exists(name)
    if not glob.has_magic(name) or is_literal:
        return [name]
    if "://" in name:
        with readable(name):
            files, path = fsspec.core.url_to_fs(name)
            paths = [files.unstrip_protocol(found) for found in sorted(files.glob(path))]
    else:
        paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    if not paths:
        raise UserError(f"no file matches {name}")
    return paths


def make_input(path: str) -> InputFile:
    """Return the input file of a path or URL. Raises UserError if it is missing, unreadable or a folder."""
    refuse_pipe(path, "the text")
    with readable(path):
        files, inner = fsspec.core.url_to_fs(path)
        is_folder = files.info(inner)["type"] == "directory"
    if is_folder:
        raise UserError(f"{path} is a folder: name its files by a pattern, such as '{path}/*.txt'")
    name = path.partition("?")[0] if "://" in path else path
    stem, suffix = os.path.splitext(name.lower())
    if suffix in COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    return InputFile(path, KINDS.get(suffix, "text"))


@contextlib.contextmanager
def open_input(file: InputFile) -> Iterator[io.BufferedReader]:
    """Open a file, decompressed by its suffix. Raises UserError for any error until the block ends."""
    with readable(file.path), fsspec.open(file.path, "rb", compression="infer") as stream:
        yield io.BufferedReader(stream, READ_BYTES)  # a network driver may return fewer bytes than asked for


@dataclass(frozen=True)
class Piece:
    """A piece of a document's text, or the whole text; `is_val`: it belongs to the validation part."""

    text: str
    ends_document: bool
    is_val: bool = False

    @property
    def bytes(self) -> int:
        """The number of bytes of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


def read_pieces(file: InputFile) -> Iterator[Piece]:
    """Yield a file's documents, each as one piece; a text file is one document, of one or more pieces.

    Raises UserError, with file and place, for bytes that are not UTF-8, for a line or row without a text, for
    a line that is too long, or as `open_input` does.
    """
    if file.kind == "text":
        return read_text(file)
    return read_jsonl(file) if file.kind == "jsonl" else read_parquet(file)


def read_text(file: InputFile) -> Iterator[Piece]:
    """Yield pieces of about PIECE_BYTES; the whitespace at the end of each is moved to the next one."""
    text, offset = "", 0
    with open_input(file) as stream:
        while lines := stream.readlines(PIECE_BYTES):
            if offset:
                piece = text.rstrip(BLANKS)
                yield Piece(piece, False)
                text = text[len(piece) :]
            content = b"".join(lines)
            try:
                text += decode_text(content, offset)
            except ValueError as error:
                raise UserError(f"{file.shown} is {error}") from None
            offset += len(content)
    yield Piece(text, True)


def read_jsonl(file: InputFile) -> Iterator[Piece]:
    row = 0
    with open_input(file) as stream:
        while line := stream.readline(MAX_LINE_BYTES + 1):
            row += 1
            place = f"line {row:,} of {file.shown}"
            if len(line) > MAX_LINE_BYTES:
                raise UserError(
                    f"{place} is longer than {MAX_LINE_BYTES >> 20} MiB: give so long a document as a text "
                    "file"
                )
            if line.strip():
                yield Piece(text_of(line, place), True)


class Document(pydantic.BaseModel):
    """A line of .jsonl or a row of .parquet; fields other than `text` are ignored."""

    text: pydantic.StrictStr


def text_of(document: bytes | dict[str, Any], place: str) -> str:
    """Return the text of a line (bytes) or row (dict). UserError, beginning with `place`, if it has none."""
    try:
        value = parse_json(document) if isinstance(document, bytes) else document
        text = check_json(value, Document).text
        text.encode()  # a lone surrogate is no text
        return text
    except ValueError as error:
        raise UserError(f'{place} is no document with a text under "{KEY}": {error}') from None


def read_parquet(file: InputFile) -> Iterator[Piece]:
    row = 0
    with open_input(file) as stream:
        from pyarrow import parquet  # an ImportError becomes open_input's UserError

        table = parquet.ParquetFile(stream, buffer_size=READ_BYTES)
        for batch in table.iter_batches(batch_size=ROWS_AT_ONCE, columns=[KEY]):
            for document in batch.to_pylist():
                row += 1
                yield Piece(text_of(document, f"row {row:,} of {file.shown}"), True)


@dataclass
class InputStats:
    """Totals over documents; the alphabet only for --tokenizer char."""

    documents: int = 0
    bytes: int = 0  # of UTF-8
    characters: int = 0
    alphabet: str = ""  # the distinct characters in code-point order

    def add(self, piece: Piece) -> None:
        """Add a piece to all totals; `alphabet` stays as it is."""
        self.documents += piece.ends_document
        self.bytes += piece.bytes
        self.characters += len(piece.text)


def split_pieces(files: Sequence[InputFile], stats: InputStats, val_fraction: float) -> Iterator[Piece]:
    """Yield the pieces of all files; documents that begin in the last `val_fraction` of bytes get `is_val`.

    The last document always gets it, the first never. A single document is cut by characters. `stats` has the
    totals of the files.
    """
    n_train = int(stats.characters * (1 - val_fraction))  # of a single document
    n_train_bytes = int(stats.bytes * (1 - val_fraction))
    so_far = InputStats()
    begin = 0  # the bytes before the document at hand, which is number `so_far.documents`
    for file in files:
        for piece in read_pieces(file):
            if stats.documents == 1:
                head = piece.text[: max(0, n_train - so_far.characters)]
                rest = piece.text[len(head) :]
                if head:
                    yield Piece(head, False)
                if rest or piece.ends_document:
                    yield Piece(rest, piece.ends_document, True)
            else:
                is_last = so_far.documents == stats.documents - 1
                is_val = so_far.documents > 0 and (begin >= n_train_bytes or is_last)
                yield Piece(piece.text, piece.ends_document, is_val)
            so_far.add(piece)
            if piece.ends_document:
                begin = so_far.bytes


Batch = list[Piece]  # pieces that are encoded together, all of one part (training, validation)


def read_batches(pieces: Iterator[Piece]) -> Iterator[Batch]:
    """Yield batches of about BATCH_BYTES, each of training or validation alone."""
    batch, size = Batch(), 0
    for piece in pieces:
        if batch and (size >= BATCH_BYTES or batch[0].is_val != piece.is_val):
            yield batch
            batch, size = Batch(), 0
        batch.append(piece)
        size += piece.bytes
    if batch:
        yield batch


def token_type(tokenizer: Tokenizer) -> np.dtype:
    """Return the type of a token in a shard: uint16 for a vocabulary of up to 65,536 tokens, else uint32."""
    return np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")


def encode(tokenizer: Tokenizer, batch: Batch) -> np.ndarray:
    """Return a batch's tokens as one array, with end-of-text, if any, after each document. Thread-safe."""
    if len(batch) == 1:  # `encode` can cut it, and it may be a very long line
        arrays = [tokenizer.encode(batch[0].text)]
    else:
        arrays = tokenizer.encode_batch([piece.text for piece in batch])
    end, dtype = tokenizer.end_of_text, token_type(tokenizer)
    parts = list[np.ndarray]()
    for tokens, piece in zip(arrays, batch, strict=True):
        parts.append(tokens)
        if piece.ends_document and end is not None:
            parts.append(np.array([end], dtype=dtype))
    return np.concatenate(parts, dtype=dtype, casting="same_kind")


def first_token_bytes(tokenizer: Tokenizer, batch: Batch) -> int:
    """Return how many bytes of UTF-8 the batch's first token covers; 0 for an end-of-text, or no token."""
    for piece in batch:
        if piece.text:
            return tokenizer.first_token_bytes(piece.text)
        if piece.ends_document and tokenizer.end_of_text is not None:
            return 0
    return 0
