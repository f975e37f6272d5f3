"""Encode text once, into shards of tokens. The same files, options and packages give the same bytes.

    python -m mingpt prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]

A file is text (UTF-8, one document), .jsonl (a document per line, under "text") or .parquet (a document per
row of the column "text"; needs pyarrow). A file is given by its path or URL; * in it matches any characters
but /. A compressed file, such as a.jsonl.gz, is decompressed. Memory grows with the longest document, and a
text file is one document.

DIR must be new or empty. The command writes train_00000.bin, ..., val_00000.bin, ... in llm.c's format there,
tokenizer.json and meta.json, which is complete last. The validation part is a share of the text: the last
documents, counted in bytes, or the last characters of a single document. If the tokenizer has an end-of-text
token, this token follows each document; if a text contains the token's name, the name is encoded as plain
text. If the command was killed, remove DIR and start the command again.

`--tokenizer bpe` trains a byte-level BPE, like GPT-2's, on the training part, up to the place where 4 MB of
distinct words have been read.
"""

import contextlib
import hashlib
import json
import logging
import os
import signal
import struct
from argparse import Namespace
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import fsspec
import numpy as np
from tqdm import tqdm

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import decode_text, fsync_path, parse_json, reason_of, write_atomic
from mingpt.base.paths import refuse_pipe, typed_path
from mingpt.base.rows import in_batches
from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer, load_named_tokenizer
from mingpt.data.json_tokenizer import (
    BATCH_CHARACTERS,
    PIECE_CHARACTERS,
    byte_level_bpe,
    import_tokenizers,
    split_text,
)
from mingpt.data.shards import FORMATS, HEADER_BYTES, read_meta
from mingpt.data.source import decompressed, readable

MAX_PIECE = 4 * PIECE_CHARACTERS  # of a text without blanks, so that the next limit holds
SAMPLE_WORD_BYTES = 4_000_000  # of distinct words: training needs about 120 bytes of memory for each
SHARD_TOKENS = 100_000_000  # as modded-nanogpt's
NARROW, WIDE = FORMATS  # headers of shards with tokens of two and of four bytes
KINDS = {".jsonl": "line", ".ndjson": "line", ".parquet": "row"}  # {suffix: what holds one document}
END_OF_TEXT = "<|endoftext|>"
# GPT-2's pattern with words of at most 256 characters: the time of a merge grows with the longest word.
WORD = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,256}| ?\p{N}{1,256}| ?[^\s\p{L}\p{N}]{1,256}"
    r"|\s{1,256}(?!\S)|\s{1,256}"
)
META = "meta.json"
log = logging.getLogger(__name__)
UNFINISHED = '{"format": 1, "complete": false}\n'  # in meta.json until all other files are complete


def read(names: Sequence[str]) -> Iterator[str]:
    """Yield the documents of the files that `names` (paths, URLs and patterns) stand for.

    The files are in the order of `names`; files that match the same pattern are sorted by their paths. Raises
    the errors of `read_file`, and UserError if a pattern matches no file, or if a name cannot be used.
    """
    for name in names:
        refuse_pipe(name, "the text")
        with readable(name):
            files = fsspec.open_files(name, "rb", expand=False)
        if not files:
            raise UserError(f"no file matches {name}")
        for file in files:
            yield from read_file(file)


def read_file(file: Any) -> Iterator[str]:
    """Yield the documents of `file`, an OpenFile of fsspec.

    Raises UserError if the file cannot be read, or if a document is not UTF-8 text. The message names the
    file and, if a document of a .jsonl or .parquet file is at fault, its line or row.
    """
    path = file.full_name.removeprefix("file://")
    with readable(path), file as raw:
        stream, suffix = decompressed(raw, path)
        kind = KINDS.get(suffix)
        if kind is None:
            yield decode_text(stream.read())
        rows: Any = read_parquet(stream) if kind == "row" else map(bytes.strip, stream)
        for number, row in enumerate(rows, 1):
            if row != b"":
                with readable(f"{kind} {number:,} of {path}"):
                    text = (parse_json(row) if isinstance(row, bytes) else row)["text"]
                    text.encode()  # fails for a lone surrogate, and for what is not text
                yield text


def read_parquet(stream: IO[bytes]) -> Iterator[dict[str, Any]]:
    from pyarrow import parquet  # an ImportError becomes the UserError of `readable`

    for batch in parquet.ParquetFile(stream).iter_batches(64, columns=["text"]):
        yield from batch.to_pylist()


def split(
    names: Sequence[str], sizes: np.ndarray, val_fraction: float
) -> tuple[Iterator[str], Iterator[str], int]:
    """Return (documents for training, documents for validation, number of bytes for validation).

    Read the first iterator to its end before the second. `sizes` has the number of bytes of each document.
    Documents that begin in the last `val_fraction` of all bytes are for validation; the last document always
    is, and the first never. If there is a single document, the last `val_fraction` of its characters are for
    validation.
    """
    texts = read(names)
    if len(sizes) == 1:
        text = next(texts)
        cut = int(len(text) * (1 - val_fraction))
        return iter([text[:cut]]), iter([text[cut:]]), len(text[cut:].encode())
    border = int(sizes.sum() * (1 - val_fraction))
    n_train = int(np.searchsorted(sizes.cumsum() - sizes, border).clip(1, len(sizes) - 1))
    return islice(texts, n_train), texts, int(sizes[n_train:].sum())


def measure(names: Sequence[str]) -> tuple[np.ndarray, set[str]]:
    """Return (an int64 array with each document's number of bytes, the set of all characters).

    The log says how many documents contain the text END_OF_TEXT. Raises UserError if there is no text.
    """
    sizes, alphabet, marked = array("q"), set[str](), 0
    for text in tqdm(read(names), "counting", unit=" documents", disable=None):
        sizes.append(len(text.encode()))
        alphabet.update(text)
        marked += END_OF_TEXT in text
    if not any(sizes):
        raise UserError("the files hold no text")
    if marked:
        log.warning(f"documents with {END_OF_TEXT} in their text: {marked:,}; there it is plain text")
    return np.array(sizes), alphabet


def train_bpe(vocab_size: int, texts: Iterable[str]) -> bytes:
    """Return the tokenizer.json of a byte-level BPE, like GPT-2's, trained on `sample(texts)`.

    The tokenizer has at most `vocab_size` tokens: the 256 bytes, the merges and, last, end-of-text. It has
    fewer tokens if the texts have too few pairs to merge. The same texts give the same tokenizer.json on any
    number of cores. In training, but not in encoding, words of more than 256 characters are split.
    """
    library = import_tokenizers("--tokenizer bpe")
    package = byte_level_bpe(library.models.BPE())
    as_encoded, byte_level = package.pre_tokenizer, library.pre_tokenizers.ByteLevel
    words = library.pre_tokenizers.Split(library.Regex(WORD), "isolated")
    to_bytes = byte_level(add_prefix_space=False, use_regex=False)
    package.pre_tokenizer = library.pre_tokenizers.Sequence([words, to_bytes])
    trainer = library.trainers.BpeTrainer(vocab_size=vocab_size - 1, initial_alphabet=byte_level.alphabet())
    package.train_from_iterator(sample(texts), trainer)
    package.pre_tokenizer = as_encoded
    package.add_special_tokens([END_OF_TEXT])
    return str(package.to_str(pretty=True)).encode()


def sample(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces, from the first text on, until the pieces have SAMPLE_WORD_BYTES of words.

    Only distinct words count. A piece has at most MAX_PIECE characters.
    """
    words, word_bytes = set[str](), 0
    for long in chain.from_iterable(split_text(text, PIECE_CHARACTERS) for text in texts):
        for start in range(0, len(long), MAX_PIECE):
            piece = long[start : start + MAX_PIECE]
            yield piece
            new = set(piece.split()) - words
            words |= new
            word_bytes += len("".join(new).encode())
            if word_bytes >= SAMPLE_WORD_BYTES:
                return


def encode(
    texts: Iterable[str], tokenizer: Tokenizer, end: list[int], dtype: np.dtype[Any]
) -> Iterator[np.ndarray]:
    """Yield the tokens of the texts in arrays of type `dtype`, with the tokens `end` after each text."""
    # A piece "" stands for the end of a text.
    pieces = (piece for text in texts for piece in (*filter(None, tokenizer.split(text)), ""))
    for batch in in_batches(pieces, len, BATCH_CHARACTERS):
        encoded = zip(batch, tokenizer.encode_batch(batch), strict=True)
        yield np.concatenate(
            [tokens if piece else end for piece, tokens in encoded], dtype=dtype, casting="unsafe"
        )


def write_tokens(out: Path, part: str, arrays: Iterable[np.ndarray]) -> int:
    """Write the tokens in `arrays`, in their order, to shards of `part` (train or val) in the folder `out`.

    Each shard but the last gets SHARD_TOKENS tokens. The headers are left empty; `finish_shard` writes them
    later. Returns the number of all tokens. Raises UserError if there is no token.
    """
    done = 0
    for tokens in arrays:
        while len(tokens):
            head = tokens[: SHARD_TOKENS - done % SHARD_TOKENS]
            with open(out / f"{part}_{done // SHARD_TOKENS:05d}.bin", "ab") as file:
                file.write(b"" if done % SHARD_TOKENS else bytes(HEADER_BYTES))
                file.write(head.tobytes())
            done, tokens = done + len(head), tokens[len(head) :]
    if not done:
        raise UserError(f"the {part} part has no token: remove the folder {out} and give more text")
    return done


def finish_shard(path: Path, header: tuple[int, int]) -> dict[str, Any]:
    """Write the header of the shard at `path`, make the shard durable, and return its entry for meta.json.

    `header` has the header's first two numbers, a key of FORMATS.
    """
    size = path.stat().st_size
    tokens = (size - HEADER_BYTES) // FORMATS[header].itemsize
    with open(path, "rb+") as file:
        file.write(struct.pack("<3i", *header, tokens))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    fsync_path(path)
    return {"name": path.name, "tokens": tokens, "bytes": size, "sha256": digest}


def prepare(options: Namespace, out: Path) -> str:
    """Encode the texts into the folder `out`, as the command's options say; return a summary for the user.

    Raises UserError for a mistake, and OSError if `out` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    if os.listdir(out):
        read_meta(out)  # raises an error that says so if prepare was interrupted here
        raise UserError(f"--out {out} holds files already: name another --out")
    names, val_fraction = options.texts, options.val_fraction
    sizes, alphabet = measure(names)
    if options.tokenizer == "char":
        tokenizer: Tokenizer = CharTokenizer("".join(sorted(alphabet)))
    elif options.tokenizer == "bpe":
        texts, *_ = split(names, sizes, val_fraction)
        tokenizer = JsonTokenizer(train_bpe(options.vocab_size, texts))
    else:
        tokenizer = load_named_tokenizer(options.tokenizer, "--tokenizer")
    with open(out / META, "x") as file:  # fails if another command writes here
        file.write(UNFINISHED)
    header, end = NARROW if len(tokenizer) <= 1 << 16 else WIDE, tokenizer.end_of_text
    ends = [] if end is None else [end]
    if end is None and len(sizes) > 1:
        log.warning("the tokenizer has no known end-of-text token: nothing separates the documents")
    train, val, val_bytes = split(names, sizes, val_fraction)
    tokens = 0
    for part, texts, after in (("train", train, ends if len(sizes) > 1 else []), ("val", val, ends)):
        arrays = encode(texts, tokenizer, after, FORMATS[header])
        tokens += write_tokens(out, part, tqdm(arrays, part, unit=" batches", disable=None))
    content = tokenizer.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    meta = {
        "format": 1,
        "complete": True,
        "tokenizer": {"sha256": digest, "vocab_size": len(tokenizer), "end_of_text": end},
        "val_bytes": val_bytes,
        "files": [finish_shard(path, header) for path in sorted(out.glob("*.bin"))],
    }
    write_atomic(out / "tokenizer.json", content)
    write_atomic(out / META, json.dumps(meta, indent=1) + "\n")
    ratio = sizes.sum() / tokens
    return f"{out}: {tokens:,} tokens of {ratio:.2f} bytes, and a vocabulary of {len(tokenizer):,}"


LIMITS = {"vocab_size": (256, 1 << 24), "val_fraction": (0, 1)}


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt prepare", __doc__)
    add = parser.add_argument
    add("texts", nargs="+", type=typed_path, metavar="TEXT_OR_URL", help="a file, pattern or URL")
    add("--out", type=typed_path, metavar="DIR", required=True, help="a new or empty folder")
    add("--tokenizer", type=typed_path, default="char", help="char (default), bpe, gpt2 or a tokenizer.json")
    add("--vocab_size", type=int, default=4096, help="tokens of bpe (default: 4096)")
    add("--val_fraction", type=float, default=0.1, help="share of the text for validation (default: 0.1)")
    options = parser.parse_args(arguments)
    for name, (low, high) in LIMITS.items():
        value = getattr(options, name)
        if not low < value < high:
            raise UserError(f"--{name} is {value}, and must be between {low} and {high}")
    # Ctrl-C ends the command at once, also in the code of `tokenizers`, which calls no handler of Python's.
    # Only the main thread may set handlers.
    with contextlib.suppress(ValueError):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        write_lines([prepare(options, Path(options.out))])
    except OSError as error:
        place = error.filename or options.out
        raise UserError(
            f"{place} cannot be written: {reason_of(error)}; start again with an empty --out"
        ) from None
    return 0
