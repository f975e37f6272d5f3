"""The command from its arguments to a complete folder: count, make the tokenizer, encode, describe."""

import hashlib
import itertools
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.data import Tokenizer, read_named_tokenizer
from mingpt.data.gpt2_vocabulary import parse_named_tokenizer
from mingpt.errors import UserError
from mingpt.prepare.batches import Batch, Split, read_batches
from mingpt.prepare.documents import Counter, InputStats, read_pieces
from mingpt.prepare.encoding import Encoder, content_of
from mingpt.prepare.folder import (
    META,
    TOKENIZER,
    Record,
    check_complete,
    open_folder,
    open_record,
    to_json,
    write_atomic,
)
from mingpt.prepare.inputs import InputFile, find_inputs
from mingpt.prepare.progress import progress
from mingpt.prepare.vocabulary import make_tokenizer, restore_tokenizer
from mingpt.prepare.writer import ShardWriter

ENCODING_THREADS = 2  # one takes the tokens out of the package while the other encodes on all cores
MAX_PENDING = 3  # batches
BPE_TOKENS = 4096
TOKENIZER_WORDS = ("char", "bpe", "gpt2")  # others are files


@dataclass(frozen=True)
class Options:
    """What the command line asks for. Raises UserError for values that are not allowed."""

    tokenizer: str = "char"  # char, bpe, gpt2, or a tokenizer.json by path or URL
    vocab_size: int | None = None  # of bpe; None: BPE_TOKENS
    val_fraction: float = 0.1
    shard_tokens: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction < 1:
            raise UserError(f"--val_fraction is {self.val_fraction}, and must be between 0 and 1")
        if not 1 <= self.shard_tokens < 1 << 31:
            raise UserError(f"--shard_tokens is {self.shard_tokens}, and must be 1 to {(1 << 31) - 1}")
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise UserError(
                f"--vocab_size {self.vocab_size} goes with --tokenizer bpe, and the tokenizer is "
                f"{self.tokenizer}: leave it out, or give --tokenizer bpe"
            )
        if self.vocab_size is not None and not 257 <= self.vocab_size <= 1 << 24:
            raise UserError(
                f"--vocab_size is {self.vocab_size}, and must be 257 (the bytes and end-of-text) to {1 << 24}"
            )

    @property
    def bpe_tokens(self) -> int:
        return self.vocab_size or BPE_TOKENS


def prepare(names: Sequence[str], out: Path, options: Options) -> str:
    """Write the shards of the files that `names` stand for to the folder `out`; returns a summary.

    A command that was killed goes on where it was. Raises UserError.
    """
    files = find_inputs(names)
    command = asdict(options) | {"files": [file.identity() for file in files]}
    if options.tokenizer == "bpe":
        command["vocab_size"] = options.bpe_tokens
    else:
        del command["vocab_size"]
    given = None  # the content of the tokenizer's file
    if options.tokenizer not in TOKENIZER_WORDS:
        given = read_named_tokenizer(options.tokenizer, "--tokenizer")
        command["tokenizer_sha256"] = sha256(given)
    with open_folder(out):
        record = open_record(out, command)
        if record.is_complete:
            check_complete(out)
            return f"{out} is complete already; --check reads it through"
        stats = count(files, record, options)
        split = Split(stats, options.val_fraction)
        check_split(split)
        tokenizer = load_or_make_tokenizer(files, record, split, options, given)
        encoder = Encoder(tokenizer)
        write_shards(files, record, split, encoder, options)
        meta = make_meta(record, stats, encoder)
        write_atomic(out / META, to_json(meta))
        record.finish()
    return summary(out, meta, stats)


def count(files: Sequence[InputFile], record: Record, options: Options) -> InputStats:
    """Read all documents once. Raises UserError for a file without text."""
    if record.stats is not None:
        return InputStats(**record.stats)
    record.save()  # an output folder that cannot be written to is found before all is read
    counter = Counter(wants_alphabet=options.tokenizer == "char")
    with progress("counting", None) as shown:
        for file in files:
            before = counter.stats.bytes
            for piece in read_pieces(file):
                shown.add(counter.add(piece))
            if counter.stats.bytes == before:
                raise UserError(f"{file.shown} holds no text")
    stats = counter.result()
    record.stats = asdict(stats)
    record.save()
    return stats


def check_split(split: Split) -> None:
    """Raises UserError if a part would be empty."""
    if split.characters == 0:
        raise UserError(
            f"a single document of {split.stats.characters} characters leaves nothing to train on with "
            f"--val_fraction {split.val_fraction}"
        )


def load_or_make_tokenizer(
    files: Sequence[InputFile], record: Record, split: Split, options: Options, given: bytes | None
) -> Tokenizer:
    """The tokenizer, whose file is in the folder from now on. Raises UserError.

    `given` is the content of the file that --tokenizer names, None where it names none.
    """
    path = record.folder / TOKENIZER
    if record.tokenizer is not None and path.is_file():
        content = path.read_bytes()
        if sha256(content) == record.tokenizer:
            return restore_tokenizer(options.tokenizer, split.stats, content)
    tokenizer: Tokenizer
    if given is not None:
        tokenizer = parse_named_tokenizer(given, options.tokenizer, "--tokenizer")
    else:
        tokenizer = make_tokenizer(options.tokenizer, options.bpe_tokens, files, split)
    content = content_of(tokenizer)
    if record.tokenizer not in (None, sha256(content)):
        raise UserError(
            f"--tokenizer {options.tokenizer} is no longer what {record.folder} was begun with: "
            "name another --out, or remove it"
        )
    unfinished = {"format": 1, "complete": False, **describe(record, len(tokenizer), None)}
    write_atomic(record.folder / META, to_json(unfinished))  # so that nobody takes a part for the whole
    write_atomic(path, content)
    record.tokenizer = sha256(content)
    record.save()
    return tokenizer


def write_shards(
    files: Sequence[InputFile], record: Record, split: Split, encoder: Encoder, options: Options
) -> None:
    """Encode and write what is missing; reading, encoding and writing overlap. Raises UserError."""
    stats = split.stats
    writer = ShardWriter(record, encoder, options.shard_tokens)
    batches = read_batches(files, split, encoder, writer.position)
    pending: deque[tuple[Batch, Future[np.ndarray]]] = deque()
    pool = ThreadPoolExecutor(ENCODING_THREADS)
    begin = writer.position.start + writer.position.bytes
    try:
        with progress("encoding", stats.bytes, begin) as shown:
            for batch in itertools.chain(batches, itertools.repeat(None)):
                if batch is not None:
                    pending.append((batch, pool.submit(encoder.encode, batch.texts, batch.ends)))
                if not pending:
                    break
                if batch is None or len(pending) > MAX_PENDING:
                    first, tokens = pending.popleft()
                    writer.write(first, tokens.result())
                    shown.add(first.bytes)
        position = writer.position
        if (position.start, position.document) != (stats.bytes, stats.documents):
            raise UserError("the input has changed while it was read: remove the folder, and start again")
        writer.close()
    except BaseException:
        writer.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def make_meta(record: Record, stats: InputStats, encoder: Encoder) -> dict[str, Any]:
    """The content of meta.json. Raises UserError if a part has no token."""
    parts = {shard["part"] for shard in record.shards}
    if parts != {"train", "val"} or record.val is None:
        raise UserError("the training or the validation part has no token: more text is needed")
    return {
        "format": 1,
        "complete": True,
        **describe(record, len(encoder.tokenizer), encoder.end_of_text),
    } | {
        "val_bytes": stats.bytes - record.val["start"] - record.val["first_token"],
        "documents": {
            "train": max(1, record.val["document"]),
            "val": stats.documents - record.val["document"],
        },
    }


def describe(record: Record, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """The fields of meta.json that are the same for a part and for the whole."""
    keys = ("name", "tokens", "bytes", "sha256")
    return {
        "tokenizer": {"sha256": record.tokenizer, "vocab_size": vocab_size, "end_of_text": end_of_text},
        "val_bytes": None,
        "documents": {"train": 0, "val": 0},
        "files": [{key: shard[key] for key in keys} for shard in record.shards],
    }


def summary(out: Path, meta: dict[str, Any], stats: InputStats) -> str:
    tokens = sum(file["tokens"] for file in meta["files"])
    val = sum(file["tokens"] for file in meta["files"] if file["name"].startswith("val"))
    return (
        f"{out}: {tokens:,} tokens ({val:,} of validation), {stats.bytes / tokens:.2f} bytes per token, "
        f"a vocabulary of {meta['tokenizer']['vocab_size']:,}, "
        f"{stats.documents:,} document{'' if stats.documents == 1 else 's'}, {len(meta['files'])} files"
    )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
