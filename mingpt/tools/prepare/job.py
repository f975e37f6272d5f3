"""The command from its arguments to a complete folder: count, make the tokenizer, encode, describe.

The tokenizer is that which --tokenizer asks for: characters, a BPE trained on the text, or one from
elsewhere. Progress is a bar on a terminal, elsewhere a line now and then.
"""

import contextlib
import hashlib
import itertools
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Never

import numpy as np
from tqdm import tqdm

from mingpt.base.errors import UserError
from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer, load_named_tokenizer, read_named_tokenizer
from mingpt.data.source import parse_named_tokenizer
from mingpt.tools.prepare.documents import (
    Batch,
    Counter,
    Encoder,
    InputFile,
    InputStats,
    Position,
    Split,
    content_of,
    find_inputs,
    read_batches,
    read_pieces,
    utf8_length,
)
from mingpt.tools.prepare.folder import (
    META,
    TOKENIZER,
    Record,
    ShardWriter,
    check_complete,
    open_folder,
    open_record,
    to_json,
    write_file,
)

LINE_EVERY_S = 30.0
END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 200_000_000
SAMPLE_WORD_BYTES = 4_000_000  # of distinct words: training needs about 120 bytes of memory for each
ENCODING_THREADS = 2  # one takes the tokens out of the package while the other encodes on all cores
MAX_PENDING = 3  # batches
BPE_TOKENS = 4096
TOKENIZER_WORDS = ("char", "bpe", "gpt2")  # others are files


class Progress:
    """Counts bytes of text on stderr."""

    def __init__(self, what: str, total: int | None, initial: int = 0) -> None:
        self._what, self._total, self._done, self._first = what, total, initial, initial
        self._began = self._last = time.monotonic()
        self._bar: tqdm[Never] | None = None
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=total, initial=initial, desc=what, unit="B", unit_scale=True, dynamic_ncols=True
            )

    def add(self, size: int) -> None:
        self._done += size
        if self._bar is not None:
            self._bar.update(size)
        elif time.monotonic() - self._last >= LINE_EVERY_S:
            self._last = time.monotonic()
            speed = (self._done - self._first) / (self._last - self._began) / 1e6
            share = f" ({100 * self._done / self._total:.1f}%)" if self._total else ""
            sys.stderr.write(f"{self._what}: {self._done / 1e6:,.0f} MB{share}, {speed:.1f} MB/s\n")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def progress(what: str, total: int | None, initial: int = 0) -> Iterator[Progress]:
    """Counting from `initial` bytes on, to `total` where it is known."""
    counted = Progress(what, total, initial)
    try:
        yield counted
    finally:
        counted.close()


def make_tokenizer(name: str, vocab_size: int, files: Sequence[InputFile], split: Split) -> Tokenizer:
    """Raises UserError for a tokenizer that cannot be had."""
    if name == "char":
        return CharTokenizer(split.stats.alphabet)
    if name == "bpe":
        return JsonTokenizer(train_bpe(vocab_size, files, split))
    return load_named_tokenizer(name, "--tokenizer")


def train_bpe(vocab_size: int, files: Sequence[InputFile], split: Split) -> bytes:
    """A tokenizer.json of a byte-level BPE as GPT-2's, trained on the beginning of the training part.

    `vocab_size` tokens: the bytes, the merges, and end-of-text as the last one; fewer if the text has not
    that many pairs. The same text gives the same content, whatever the number of cores.
    """
    try:
        from tokenizers import Tokenizer as PackageTokenizer
        from tokenizers import decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise UserError(
            f"--tokenizer bpe needs the package tokenizers, which cannot be imported ({error}): "
            "pip install tokenizers"
        ) from None
    package = PackageTokenizer(models.BPE())
    package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    package.train_from_iterator([], trainer)  # the bytes alone
    cutter = Encoder(JsonTokenizer(package.to_str().encode()))
    texts = sample(read_batches(files, split, cutter, Position()))
    package.train_from_iterator(texts, trainer)
    package.add_special_tokens([END_OF_TEXT])
    content: str = package.to_str(pretty=True)
    return content.encode()


def sample(batches: Iterator[Batch]) -> Iterator[str]:
    """Texts of the training part, until there are enough of them, or of distinct words."""
    words: set[str] = set()
    size = word_bytes = 0
    for batch in batches:
        for text in batch.texts:
            if batch.is_val or size >= SAMPLE_BYTES or word_bytes >= SAMPLE_WORD_BYTES:
                return
            new = set(text.split()) - words
            word_bytes += sum(map(utf8_length, new))
            words |= new
            size += utf8_length(text)
            yield text


def restore_tokenizer(name: str, stats: InputStats, content: bytes) -> Tokenizer:
    """The tokenizer of a command that goes on, from its tokenizer.json."""
    return CharTokenizer(stats.alphabet) if name == "char" else JsonTokenizer(content)


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
        write_file(out / META, to_json(meta))
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
    write_file(record.folder / META, to_json(unfinished))  # so that nobody takes a part for the whole
    write_file(path, content)
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
