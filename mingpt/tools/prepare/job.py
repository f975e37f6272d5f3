"""Run the command: count the text, make the tokenizer, encode the text, write shards and meta.json.

--tokenizer asks for a tokenizer of characters, a BPE trained on the text, or one from elsewhere. A bar on
stderr shows the progress; if stderr is no terminal, the bar is written every LINE_EVERY_S seconds.
"""

import contextlib
import hashlib
import logging
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

import numpy as np
from tqdm import tqdm

from mingpt.base.errors import UserError
from mingpt.base.files import remove_quietly
from mingpt.base.system import start
from mingpt.data.source import parse_named_tokenizer, read_named_tokenizer
from mingpt.data.tokenizers import CharTokenizer, Tokenizer
from mingpt.tools.prepare.documents import (
    Batch,
    InputFile,
    InputStats,
    Piece,
    encode,
    find_inputs,
    first_token_bytes,
    read_batches,
    read_pieces,
    split_pieces,
    token_type,
)
from mingpt.tools.prepare.folder import META, TOKENIZER, UNFINISHED, ShardWriter, open_folder, write_file

LINE_EVERY_S = 30.0
POLL_S = 0.1  # a signal that another thread takes does not wake the main one
END_OF_TEXT = "<|endoftext|>"
SAMPLE_BYTES = 200_000_000
SAMPLE_WORD_BYTES = 4_000_000  # of distinct words: training needs about 120 bytes of memory for each
ENCODING_THREADS = 2  # one copies tokens out of the package while the other encodes on all cores
MAX_PENDING = 3  # batches
BPE_TOKENS = 4096
# GPT-2's pattern with words of at most 256 characters: the time of a merge grows with the longest word.
WORD = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}{1,256}| ?\p{N}{1,256}| ?[^\s\p{L}\p{N}]{1,256}"
    r"|\s{1,256}(?!\S)|\s{1,256}"
)
log = logging.getLogger(__name__)
MADE_TOKENIZERS = ("char", "bpe")  # of the text


def pause_s() -> float:
    """Return the seconds between two updates of the progress bar."""
    return POLL_S if sys.stderr.isatty() else LINE_EVERY_S


def progress(what: str, total: int | None = None) -> "tqdm[Never]":
    """Return a progress bar on stderr that counts bytes of text."""
    return tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        dynamic_ncols=True,
        miniters=0,
        mininterval=pause_s(),
        delay=pause_s(),
    )


def train_bpe(vocab_size: int, pieces: Iterable[Piece]) -> bytes:
    """Return a tokenizer.json of a byte-level BPE as GPT-2's, trained on the first part of the training text.

    It has `vocab_size` tokens: the bytes, the merges, and end-of-text as the last one; fewer if the text has
    too few pairs to merge. The same text gives the same content, whatever the number of cores. Words longer
    than those of WORD are cut for training. The package trains in a thread and obeys no signal: after Ctrl-C
    KeyboardInterrupt is raised at once, and the thread runs until the process ends.
    """
    try:
        from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
        from tokenizers import Tokenizer as PackageTokenizer
    except ImportError as error:
        raise UserError(
            f"--tokenizer bpe needs the package tokenizers, which cannot be imported ({error}): "
            "pip install tokenizers"
        ) from None
    package = PackageTokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(WORD), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    package.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    package.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    with progress("training a BPE") as shown:
        texts = sample(pieces, shown)
        outcome, thread = start(lambda: package.train_from_iterator(texts, trainer))
        while thread.is_alive():
            thread.join(POLL_S)
            shown.update(0)  # shows the seconds that have passed
    outcome.result()
    package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    package.add_special_tokens([END_OF_TEXT])
    content: str = package.to_str(pretty=True)
    return content.encode()


def sample(pieces: Iterable[Piece], shown: "tqdm[Never]") -> Iterator[str]:
    """Yield texts of the training part, until SAMPLE_BYTES, or SAMPLE_WORD_BYTES of distinct words."""
    words: set[str] = set()
    size = word_bytes = 0
    for piece in pieces:
        if piece.is_val or size >= SAMPLE_BYTES or word_bytes >= SAMPLE_WORD_BYTES:
            return
        new = set(piece.text.split()) - words
        word_bytes += sum(len(word.encode()) for word in new)
        words |= new
        size += piece.bytes
        shown.update(piece.bytes)
        yield piece.text


@dataclass(frozen=True)
class Options:
    """The options of the command line. Raises UserError for values that are not allowed."""

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
    """Write the shards of `names` (files, patterns, URLs) to the empty folder `out`; return a summary.

    Raises UserError. If it is raised before a shard is begun, the folder is empty again.
    """
    files = find_inputs(names)
    is_made = options.tokenizer in MADE_TOKENIZERS
    content = b"" if is_made else read_named_tokenizer(options.tokenizer, "--tokenizer")
    with open_folder(out):
        write_file(out / META, UNFINISHED)
        try:
            stats = count(files, options)
            content = content or make_tokenizer(files, stats, options)
            tokenizer = parse_named_tokenizer(content, options.tokenizer, "--tokenizer")
        except BaseException:
            remove_quietly(out / META)
            raise
        write_file(out / TOKENIZER, content)
        meta = write_shards(files, stats, out, tokenizer, hashlib.sha256(content).hexdigest(), options)
        write_file(out / META, meta)
    return summary(out, meta, stats)


def count(files: Sequence[InputFile], options: Options) -> InputStats:
    """Read all files once; return totals. UserError for an empty file, or too short a single document."""
    stats, alphabet = InputStats(), set[str]()
    with progress("counting") as shown:
        for file in files:
            before = stats.bytes
            for piece in read_pieces(file):
                stats.add(piece)
                if options.tokenizer == "char":
                    alphabet.update(piece.text)
                shown.update(piece.bytes)
            if stats.bytes == before:
                raise UserError(f"{file.shown} holds no text")
    stats.alphabet = "".join(sorted(alphabet))
    if stats.documents == 1 and int(stats.characters * (1 - options.val_fraction)) == 0:
        raise UserError(
            f"a single document of {stats.characters} characters leaves nothing to train on with "
            f"--val_fraction {options.val_fraction}"
        )
    return stats


def make_tokenizer(files: Sequence[InputFile], stats: InputStats, options: Options) -> bytes:
    """Return the tokenizer.json of the text's characters, or of a BPE trained on it. Raises UserError."""
    if options.tokenizer == "char":
        return CharTokenizer(stats.alphabet).to_tokenizer_json()
    return train_bpe(options.bpe_tokens, split_pieces(files, stats, options.val_fraction))


def write_shards(
    files: Sequence[InputFile],
    stats: InputStats,
    out: Path,
    tokenizer: Tokenizer,
    tokenizer_sha256: str,
    options: Options,
) -> dict[str, Any]:
    """Write the shards; return what meta.json will hold. Raises UserError, also for changed input."""
    batches = read_batches(split_pieces(files, stats, options.val_fraction))
    train, val = InputStats(), InputStats()
    unpredicted_bytes: int | None = None  # bytes of the validation part's first token
    loses_text = False
    with progress("encoding", stats.bytes) as shown, contextlib.ExitStack() as unfinished:
        writer = ShardWriter(out, token_type(tokenizer), options.shard_tokens, unfinished)
        for batch, tokens in encode_batches(batches, tokenizer):
            is_val = batch[0].is_val
            for piece in batch:
                (val if is_val else train).add(piece)
                shown.update(piece.bytes)
            if is_val and unpredicted_bytes is None:
                unpredicted_bytes = first_token_bytes(tokenizer, batch)
                loses_text = tokenizer.loses("".join(piece.text for piece in batch))
            writer.write(tokens, is_val)
        if (train.documents + val.documents, train.bytes + val.bytes) != (stats.documents, stats.bytes):
            raise UserError("the input has changed while it was read: remove the folder, and start again")
        writer.finish_shard()
    if unpredicted_bytes is None or len({file["name"][0] for file in writer.files}) < 2:
        raise UserError("the training or the validation part has no token: more text is needed")
    if loses_text:
        log.warning("the tokenizer loses some of the text: there will be no bits per byte")
    return {
        "format": 1,
        "complete": True,
        "tokenizer": {
            "sha256": tokenizer_sha256,
            "vocab_size": len(tokenizer),
            "end_of_text": tokenizer.end_of_text,
        },
        "val_bytes": None if loses_text else val.bytes - unpredicted_bytes,
        "documents": {"train": max(1, train.documents), "val": val.documents},
        "files": writer.files,
    }


def encode_batches(batches: Iterable[Batch], tokenizer: Tokenizer) -> Iterator[tuple[Batch, np.ndarray]]:
    """Yield each batch with its tokens; reading overlaps encoding."""
    pending: deque[tuple[Batch, Future[np.ndarray]]] = deque()
    with ThreadPoolExecutor(ENCODING_THREADS) as pool:
        for batch in batches:
            pending.append((batch, pool.submit(encode, tokenizer, batch)))
            if len(pending) > MAX_PENDING:
                oldest, tokens = pending.popleft()
                yield oldest, tokens.result()
        for oldest, tokens in pending:
            yield oldest, tokens.result()


def summary(out: Path, meta: dict[str, Any], stats: InputStats) -> str:
    tokens = sum(file["tokens"] for file in meta["files"])
    val = sum(file["tokens"] for file in meta["files"] if file["name"].startswith("val"))
    return (
        f"{out}: {tokens:,} tokens ({val:,} of validation), {stats.bytes / tokens:.2f} bytes per token, "
        f"a vocabulary of {meta['tokenizer']['vocab_size']:,}, "
        f"{stats.documents:,} document{'' if stats.documents == 1 else 's'}, {len(meta['files'])} files"
    )
