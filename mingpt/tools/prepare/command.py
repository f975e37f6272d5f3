"""Encode text once, into shards of tokens.

    python -m mingpt prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]

A file is text (UTF-8, one document), .jsonl (a document per line, under "text") or .parquet (a document per
row of the column "text"; needs pyarrow), by path, pattern ('data/*.jsonl') or URL; compressed if named so
(.gz). A line of .jsonl may have 64 MiB.

DIR, which is new or empty, gets train_00000.bin, ..., val_00000.bin, ... in llm.c's format, tokenizer.json
and, when all of them are complete, meta.json. The validation part is the last documents, by count of bytes,
or the last characters of a single document. An end-of-text, if the tokenizer has one, follows each document;
its name in a text is plain text. After a command that was killed, remove DIR and start the command again.

bpe trains a byte-level BPE as GPT-2's on the training part: its first 200 MB, or less if these have more than
4 MB of distinct words, so that memory stays below 1 GB.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.base.paths import typed_path
from mingpt.tools.prepare.job import Options, prepare


def make_parser() -> CommandParser:
    default = Options()
    usage = "%(prog)s TEXT_OR_URL... --out DIR [options]"
    parser = CommandParser("python -m mingpt prepare", __doc__, usage)
    parser.add_argument(
        "texts", nargs="*", type=typed_path, metavar="TEXT_OR_URL", help="a file, pattern or URL"
    )
    parser.add_argument("--out", type=typed_path, metavar="DIR", help="a new or empty folder")
    parser.add_argument(
        "--tokenizer",
        type=typed_path,
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
    if not given.texts or given.out is None:
        raise UserError("name at least one text, and --out DIR")
    options = Options(given.tokenizer, given.vocab_size, given.val_fraction, given.shard_tokens)
    try:
        write_lines([prepare(given.texts, Path(given.out), options)])
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted: remove the folder {given.out} and run the same command again\n")
        os._exit(130)  # ending the interpreter would abort in a thread that trains a BPE
    return 0
