"""Encode text once, into shards of tokens. The same files and options give the same bytes on any machine.

    python -m mingpt prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]

A file is text (UTF-8, one document), .jsonl (a document per line, under "text") or .parquet (a document per
row of the column "text"; needs pyarrow). A file is given by its path, a pattern ('data/*.jsonl') or its URL.
A compressed file, such as a.jsonl.gz, is decompressed. Memory grows with the longest document, and a text
file is one document.

DIR must be new or empty. The command writes train_00000.bin, ..., val_00000.bin, ... in llm.c's format there,
tokenizer.json and, last, meta.json. The validation part is a share of the text: the last documents, counted
in bytes, or the last characters of a single document. If the tokenizer has an end-of-text token, this token
follows each document; if a text contains the token's name, the name is encoded as plain text. If the
command was killed, remove DIR and start the command again.

`--tokenizer bpe` trains a byte-level BPE, like GPT-2's, on the first 200 MB of the training part. If the
first 200 MB have more than 4 MB of distinct words, less text is used.
"""

import hashlib
import json
import logging
import os
import signal
import struct
import sys
import tempfile
import threading
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Never

import fsspec
import numpy as np
from fsspec.implementations.local import LocalFileSystem
from tqdm import tqdm

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import decode_text, fsync_path, parse_json, reason_of, write_atomic
from mingpt.base.paths import refuse_pipe, typed_path
from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer, load_named_tokenizer
from mingpt.data.json_tokenizer import PIECE_CHARACTERS, byte_level_bpe, import_tokenizers, split_text
from mingpt.data.shards import FORMATS, HEADER_BYTES, UINT16, UINT32, read_meta
from mingpt.data.source import decompressed, readable

BATCH_CHARACTERS = 1 << 19  # encoded at once; while it encodes, `tokenizers` needs about 100 bytes per token
MAX_PENDING = 3  # batches that are read ahead
MAX_PIECE = 4 * PIECE_CHARACTERS  # of a text without blanks, so that the next two limits hold
SAMPLE_BYTES = 200_000_000
SAMPLE_WORD_BYTES = 4_000_000  # of distinct words: training needs about 120 bytes of memory for each
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


def find_files(names: Sequence[str]) -> list[Any]:
    """Return an fsspec OpenFile for each file that `names` (paths, URLs and patterns) stand for.

    The files are in the order of `names`; files that match the same pattern are sorted by their names. Raises
    UserError if a pattern matches no file, or if a name cannot be used; a missing file is noticed by `read`.
    """
    found = list[Any]()
    for name in names:
        refuse_pipe(name, "the text")
        paths: Any = name  # fsspec knows the patterns of URLs
        if "://" not in name:
            paths = [name] if os.path.exists(name) or not has_magic(name) else sorted(glob(name))
        with readable(name):
            files = fsspec.open_files(paths, "rb", expand=False) if paths else []
        if not files:
            raise UserError(f"no file matches {name}")
        found += files
    return found


def read(file: Any) -> Iterator[str]:
    """Yield the documents of `file`, an OpenFile of fsspec.

    Raises UserError if the file cannot be read, or if a document is not UTF-8 text. The message names the
    file and, if a document of a .jsonl or .parquet file is at fault, its line or row.
    """
    path = file.path if isinstance(file.fs, LocalFileSystem) else file.full_name
    with readable(path), file as raw:
        stream, suffix = decompressed(raw, path)
        kind = KINDS.get(suffix)
        if kind is None:
            yield decode_text(stream.read())
        rows: Iterable[Any] = read_parquet(stream) if kind == "row" else map(bytes.strip, stream)
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
    files: Sequence[Any], sizes: np.ndarray, val_fraction: float
) -> tuple[Iterator[str], Iterator[str]]:
    """Return (iterator over documents for training, iterator over documents for validation).

    Read the first iterator to its end before the second. `sizes` has the number of bytes of each document.
    Documents that begin in the last `val_fraction` of all bytes are for validation; the last document always
    is, and the first never. If there is a single document, the last `val_fraction` of its characters are for
    validation.
    """
    texts = chain.from_iterable(map(read, files))
    if len(sizes) == 1:
        text = next(texts)
        cut = int(len(text) * (1 - val_fraction))
        return iter([text[:cut]]), iter([text[cut:]])
    begins = sizes.cumsum() - sizes
    late = int(np.searchsorted(begins, int(sizes.sum() * (1 - val_fraction))))
    return islice(texts, max(1, min(late, len(sizes) - 1))), texts


def progress(what: str, total: int | None = None) -> "tqdm[Never]":
    """Return a progress bar on stderr, labelled `what`, that counts bytes of text.

    `total` is the number of bytes at the end; None: not known. If stderr is not a terminal, the bar is
    written every 30 s. TQDM_DISABLE does not disable the bar, because `prepare` uses the bar's count.
    """
    pause_s = 0.2 if sys.stderr.isatty() else 30.0
    return tqdm(
        None,
        what,
        total,
        unit="B",
        unit_scale=True,
        ncols=80,
        mininterval=pause_s,
        delay=pause_s,
        disable=False,
    )


def measure(files: Sequence[Any], wants_alphabet: bool) -> tuple[np.ndarray, set[str]]:
    """Return (bytes of each document as an int64 array, the set of all characters in the documents).

    The set is empty unless `wants_alphabet`. The log says how many documents contain the text END_OF_TEXT.
    Raises UserError if there is no text.
    """
    sizes, alphabet, marked = array("q"), set[str](), 0
    with progress("counting") as bar:
        for text in chain.from_iterable(map(read, files)):
            sizes.append(len(text.encode()))
            bar.update(sizes[-1])
            marked += END_OF_TEXT in text
            if wants_alphabet:
                alphabet.update(text)
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
    content: str = package.to_str(pretty=True)
    return content.encode()


def pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in pieces of at most MAX_PIECE characters; most have at least PIECE_CHARACTERS.

    A piece ends before a blank or, if there is none, in a word.
    """
    for piece in chain.from_iterable(split_text(text, PIECE_CHARACTERS) for text in texts):
        for start in range(0, len(piece), MAX_PIECE):
            yield piece[start : start + MAX_PIECE]


def sample(texts: Iterable[str]) -> Iterator[str]:
    """Yield the texts in `pieces`, from the first text on, until these together have SAMPLE_BYTES bytes.

    Stops earlier if the distinct words of these pieces have SAMPLE_WORD_BYTES bytes.
    """
    words = set[str]()
    size = word_bytes = 0
    for piece in pieces(texts):
        yield piece
        new = set(piece.split()) - words
        words |= new
        word_bytes += len("".join(new).encode())
        size += len(piece.encode())
        if size >= SAMPLE_BYTES or word_bytes >= SAMPLE_WORD_BYTES:
            return


def read_batches(texts: Iterable[str], tokenizer: Tokenizer, bar: "tqdm[Never]") -> Iterator[list[str]]:
    """Yield lists of pieces of the texts; a list ends when it has BATCH_CHARACTERS characters or more.

    `tokenizer` splits the texts into pieces. A piece "" marks the end of each text. `bar` is advanced by the
    number of bytes of each piece.
    """
    batch, size = list[str](), 0
    for text in texts:
        for piece in (*filter(None, tokenizer.split(text)), ""):
            batch.append(piece)
            size += len(piece)
            bar.update(len(piece.encode()))
            if size >= BATCH_CHARACTERS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def encode_all(
    batches: Iterable[list[str]], tokenizer: Tokenizer, end: list[int], dtype: np.dtype[Any]
) -> Iterator[np.ndarray]:
    """Yield an array of tokens for each batch, with `end` in place of each piece "", which ends a text.

    `end` has the id of the end-of-text token, or is empty. Two threads encode, so that one batch is encoded
    while the tokens of another batch are copied.
    """

    def encode(batch: list[str]) -> np.ndarray:
        arrays = zip(batch, tokenizer.encode_batch(batch), strict=True)
        parts = [tokens if piece else end for piece, tokens in arrays]
        return np.concatenate(parts, dtype=dtype, casting="unsafe")

    pending = deque[Future[np.ndarray]]()
    with ThreadPoolExecutor(2) as pool:
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) > MAX_PENDING:
                yield pending.popleft().result()
        yield from (tokens.result() for tokens in pending)


def write_tokens(out: Path, part: str, arrays: Iterable[np.ndarray], shard_tokens: int) -> int:
    """Write the tokens in `arrays`, in their order, to shards of `part` (train or val) in the folder `out`.

    Each shard but the last gets `shard_tokens` tokens. The headers are left empty; `finish_shard` writes them
    later. Returns the number of all tokens. Raises UserError if there is no token.
    """
    done = 0
    for tokens in arrays:
        while len(tokens):
            head = tokens[: shard_tokens - done % shard_tokens]
            with open(out / f"{part}_{done // shard_tokens:05d}.bin", "ab") as file:
                file.write(b"" if done % shard_tokens else bytes(HEADER_BYTES))
                file.write(head.tobytes())
            done, tokens = done + len(head), tokens[len(head) :]
    if not done:
        raise UserError(f"the {part} part has no token: remove the folder {out} and give more text")
    return done


def finish_shard(path: Path, dtype: np.dtype[Any]) -> dict[str, Any]:
    """Write the header of the shard at `path`, make the shard durable, and return its entry for meta.json."""
    size = path.stat().st_size
    tokens = (size - HEADER_BYTES) // dtype.itemsize
    magic, version = next(numbers for numbers, of_tokens in FORMATS.items() if of_tokens == dtype)
    with open(path, "rb+") as file:
        file.write(struct.pack("<3i", magic, version, tokens))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    fsync_path(path)
    return {"name": path.name, "tokens": tokens, "bytes": size, "sha256": digest}


def make_tokenizer(
    files: Sequence[Any], sizes: np.ndarray, alphabet: set[str], options: Namespace
) -> Tokenizer:
    """Return the tokenizer that --tokenizer names.

    char is made from `alphabet`, and bpe is trained on the training part of `files`, whose documents have
    `sizes` bytes. Raises UserError if the tokenizer cannot be loaded or made.
    """
    if options.tokenizer == "char":
        return CharTokenizer("".join(sorted(alphabet)))
    if options.tokenizer != "bpe":
        return load_named_tokenizer(options.tokenizer, "--tokenizer")
    texts, _ = split(files, sizes, options.val_fraction)
    return JsonTokenizer(train_bpe(options.vocab_size, texts))


def prepare(options: Namespace, out: Path) -> str:
    """Encode the texts into the folder `out`, as the command's options say; return a summary for the user.

    Raises UserError for a mistake, and OSError if `out` cannot be written.
    """
    files, tokens = find_files(options.texts), 0
    out.mkdir(parents=True, exist_ok=True)
    if os.listdir(out):
        read_meta(out)  # raises an error that says so if prepare was interrupted here
        raise UserError(f"--out {out} holds files already: name another --out")
    tempfile.TemporaryFile(dir=out).close()  # fails now rather than after the work, and leaves nothing
    sizes, alphabet = measure(files, options.tokenizer == "char")
    tokenizer = make_tokenizer(files, sizes, alphabet, options)
    with open(out / META, "x") as file:  # fails if another command writes here
        file.write(UNFINISHED)
    dtype, end = UINT16 if len(tokenizer) <= 1 << 16 else UINT32, tokenizer.end_of_text
    ends = [] if end is None else [end]
    if end is None and len(sizes) > 1:
        log.warning("the tokenizer has no known end-of-text token: nothing separates the documents")
    train, val = split(files, sizes, options.val_fraction)
    with progress("encoding", int(sizes.sum())) as bar:
        for part, texts, after in (("train", train, ends if len(sizes) > 1 else []), ("val", val, ends)):
            before = bar.n
            arrays = encode_all(read_batches(texts, tokenizer, bar), tokenizer, after, dtype)
            tokens += write_tokens(out, part, arrays, options.shard_tokens)
    content = tokenizer.to_tokenizer_json() or b""
    digest = hashlib.sha256(content).hexdigest()
    meta = {
        "format": 1,
        "complete": True,
        "tokenizer": {"sha256": digest, "vocab_size": len(tokenizer), "end_of_text": end},
        "val_bytes": bar.n - before,
        "files": [finish_shard(path, dtype) for path in sorted(out.glob("*.bin"))],
    }
    write_atomic(out / "tokenizer.json", content)
    write_atomic(out / META, json.dumps(meta, indent=1) + "\n")
    ratio = int(sizes.sum()) / tokens
    return f"{out}: {tokens:,} tokens of {ratio:.2f} bytes, and a vocabulary of {len(tokenizer):,}"


OPTIONS: dict[str, Any] = {  # type, default, what it is
    "tokenizer": (typed_path, "char", "char, bpe, gpt2, or a tokenizer.json by path or URL"),
    "vocab_size": (int, 4096, "tokens of bpe, end-of-text included"),
    "val_fraction": (float, 0.1, "share of the text for validation"),
    "shard_tokens": (int, 100_000_000, "tokens of a full shard"),
}
LIMITS = {"vocab_size": (256, 1 << 24), "val_fraction": (0, 1), "shard_tokens": (0, 1 << 31)}


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser("python -m mingpt prepare", __doc__)
    add = parser.add_argument
    add("texts", nargs="+", type=typed_path, metavar="TEXT_OR_URL", help="a file, pattern or URL")
    add("--out", type=typed_path, metavar="DIR", required=True, help="a new or empty folder")
    for name, (kind, default, about) in OPTIONS.items():
        add(f"--{name}", type=kind, default=default, help=f"{about} (default: {default})")
    options = parser.parse_args(arguments)
    for name, (low, high) in LIMITS.items():
        value = getattr(options, name)
        if not low < value < high:
            raise UserError(f"--{name} is {value}, and must be between {low} and {high}")
    # Ctrl-C ends the command at once, also in the code of `tokenizers`, which calls no handler of Python's.
    # Only the main thread may set handlers.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        write_lines([prepare(options, Path(options.out))])
    except OSError as error:
        place = error.filename or options.out
        raise UserError(
            f"{place} cannot be written: {reason_of(error)}; start again with an empty --out"
        ) from None
    return 0
