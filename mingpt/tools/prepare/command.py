"""Encode text once, into shards of tokens.

    python -m mingpt prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]
    python -m mingpt prepare --check DIR

A file is text (UTF-8, one document), .jsonl (a document per line, under "text") or .parquet (a document per
row of the column "text"; needs pyarrow), by path, pattern ('data/*.jsonl') or URL; compressed if named so
(.gz). A line of .jsonl may have 64 MiB.

DIR gets train_00000.bin, ..., val_00000.bin, ... in llm.c's format, tokenizer.json, meta.json, and
prepare.json, a record of progress. The validation part is the last documents, by count of bytes, or the last
characters of a single document. An end-of-text, if the tokenizer has one, follows each document; its
name in a text is plain text. Files appear when they are complete. A command that was killed goes on when it
is started again: it reads the text once more, and encodes what its finished shards do not have.

bpe trains a byte-level BPE as GPT-2's on the training part: its first 200 MB, or less if these have more than
4 MB of distinct words, so that memory stays below 1 GB.

--check reads a folder through: sizes, headers, checksums, tokens past the vocabulary. Of shards that other
programs wrote it checks sizes and headers, reads every token and prints the largest. Exit code 1 if something
is wrong, with a line for each file that is not right.
"""

import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.files import PIECE_BYTES
from mingpt.data.shard_files import ShardFile, inspect, read_meta
from mingpt.tools.prepare.folder import META, check_tokenizer
from mingpt.tools.prepare.job import Options, prepare


def check_folder(folder: Path) -> tuple[bool, list[str]]:
    """Check a folder of shards; return (True, [summary]) or (False, faults). UserError if it is no folder."""
    if not folder.is_dir():
        raise UserError(f"--check {folder} is no folder")
    try:
        meta = read_meta(folder)
    except UserError as error:
        return False, [str(error)]
    entries = {entry["name"]: entry for entry in meta["files"]} if meta else {}
    names = sorted({path.name for path in folder.glob("*.bin")} | entries.keys())
    problems = [] if names else [f"{folder}: holds no .bin file"]
    tokens, largest = 0, -1
    for name in names:
        try:
            info, largest_here = read_through(folder / name, entries.get(name), meta)
        except UserError as error:
            problems.append(str(error))
            continue
        tokens += info.tokens
        largest = max(largest, largest_here)
    if meta and meta["tokenizer"]["sha256"] is not None:
        try:
            check_tokenizer(folder, meta["tokenizer"]["sha256"])
        except UserError as error:
            problems.append(str(error))
    whole = f"{folder}: {tokens:,} tokens in {len(names)} files, largest token {largest}"
    return not problems, problems or [whole]


def read_through(
    path: Path, entry: dict[str, Any] | None, meta: dict[str, Any] | None
) -> tuple[ShardFile, int]:
    """Read all of a shard; return its description and its largest token. UserError for the first fault.

    `meta` is the content of meta.json and `entry` the shard's entry there; both are None without a meta.json.
    """
    if meta and not entry:
        raise UserError(f"{path}: {META} does not list it")
    info = inspect(str(path), entry)
    digest, largest = hashlib.sha256(), -1
    try:
        with open(path, "rb") as file:
            digest.update(file.read(info.offset))
            while content := file.read(PIECE_BYTES):
                digest.update(content)
                largest = max(largest, int(np.frombuffer(content, dtype=info.dtype).max()))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    if meta and largest >= meta["tokenizer"]["vocab_size"]:
        size = meta["tokenizer"]["vocab_size"]
        raise UserError(f"{path}: holds token {largest}, and the vocabulary has {size}")
    if entry and digest.hexdigest() != entry["sha256"]:
        raise UserError(f"{path}: sha256 is {digest.hexdigest()}, and {META} says {entry['sha256']}")
    return info, largest


def make_parser() -> CommandParser:
    default = Options()
    usage = "%(prog)s TEXT_OR_URL... --out DIR [options] | --check DIR"
    parser = CommandParser("python -m mingpt prepare", __doc__, usage)
    parser.add_argument("texts", nargs="*", metavar="TEXT_OR_URL", help="a file, pattern or URL")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new or empty folder, or that of a killed command"
    )
    parser.add_argument("--check", type=Path, metavar="DIR", help="read a folder through")
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        default=default.tokenizer,
        help="char, bpe, gpt2, or a tokenizer.json by path or URL (default %(default)s)",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        metavar="N",
        help=f"tokens of bpe, end-of-text included (default {default.bpe_tokens})",
    )
    parser.add_argument(
        "--val_fraction",
        type=float,
        metavar="F",
        default=default.val_fraction,
        help="share of the text for validation (default %(default)s)",
    )
    parser.add_argument(
        "--shard_tokens",
        type=int,
        metavar="N",
        default=default.shard_tokens,
        help="tokens of a full shard (default %(default)s)",
    )
    return parser


def main(arguments: Sequence[str]) -> int:
    given = make_parser().parse_args(arguments)
    if given.check is not None:
        if given.texts or given.out is not None:
            raise UserError("--check stands alone")
        is_good, lines = check_folder(given.check)
        write_lines(lines)
        return 0 if is_good else 1
    if not given.texts or given.out is None:
        raise UserError("name at least one text, and --out DIR; or --check DIR")
    options = Options(given.tokenizer, given.vocab_size, given.val_fraction, given.shard_tokens)
    try:
        write_lines([prepare(given.texts, given.out, options)])
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on from the last finished shard\n")
        os._exit(130)  # ending the interpreter would abort in a thread that trains a BPE
    return 0
