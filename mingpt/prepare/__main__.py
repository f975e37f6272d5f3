"""Encode text once, into shards of tokens.

    python -m mingpt.prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]
    python -m mingpt.prepare --check DIR

A file is text (UTF-8, one document), .jsonl (a document per line, under "text") or .parquet (a document per
row of the column "text"; needs pyarrow), by path, pattern ('data/*.jsonl') or URL; compressed if named so
(.gz). A line of .jsonl may have 64 MiB.

DIR gets train_00000.bin, ..., val_00000.bin, ... in llm.c's format, tokenizer.json and meta.json. Validation
is the tail: whole documents by count of bytes, of a single document the last characters. Where the tokenizer
has an end-of-text it follows each document; spelled in a text it is plain text. Files appear when they are
complete. A command that was killed goes on when it is started again, from its last finished shard.

bpe trains a byte-level BPE as GPT-2's on the training part: its first 200 MB, or less if these have more than
4 MB of distinct words, so that memory stays below 1 GB.

--check reads a folder through: sizes, headers, checksums, tokens past the vocabulary. Of shards that other
programs wrote it checks sizes and headers, reads every token and prints the largest. Exit code 1 if something
is wrong.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from mingpt.cli import CommandParser
from mingpt.errors import UserError
from mingpt.prepare import Options, check_folder, prepare
from mingpt.redact import RedactingFormatter, redact


def make_parser() -> CommandParser:
    default = Options()
    parser = CommandParser(
        prog="python -m mingpt.prepare",
        usage="%(prog)s TEXT_OR_URL... --out DIR [options] | --check DIR",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("texts", nargs="*", metavar="TEXT_OR_URL", help="a file, pattern or URL")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a new or empty folder, or that of a killed command"
    )
    parser.add_argument("--check", type=Path, metavar="DIR", help="read a folder through")
    name = f"char, bpe, gpt2, or a tokenizer.json by path or URL (default {default.tokenizer})"
    parser.add_argument("--tokenizer", metavar="NAME", default=default.tokenizer, help=name)
    size = f"tokens of bpe, end-of-text included (default {default.bpe_tokens})"
    parser.add_argument("--vocab_size", type=int, metavar="N", help=size)
    share = f"share of the text for validation (default {default.val_fraction})"
    parser.add_argument("--val_fraction", type=float, metavar="F", default=default.val_fraction, help=share)
    tokens = f"tokens of a full shard (default {default.shard_tokens:,})"
    parser.add_argument("--shard_tokens", type=int, metavar="N", default=default.shard_tokens, help=tokens)
    return parser


def run(argv: Sequence[str] | None) -> tuple[bool, list[str]]:
    """Whether all is well, and what to print. Raises UserError."""
    arguments = make_parser().parse_args(argv)
    if arguments.check is not None:
        if arguments.texts or arguments.out is not None:
            raise UserError("--check stands alone")
        return check_folder(arguments.check)
    if not arguments.texts or arguments.out is None:
        raise UserError("name at least one text, and --out DIR; or --check DIR")
    options = Options(
        arguments.tokenizer, arguments.vocab_size, arguments.val_fraction, arguments.shard_tokens
    )
    return True, [prepare(arguments.texts, arguments.out, options)]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; `argv` has the arguments, None those of the command line."""
    handler = logging.StreamHandler()
    handler.setFormatter(RedactingFormatter("%(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        is_good, lines = run(argv)
    except UserError as error:
        sys.stderr.write(f"error: {redact(str(error))}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on from the last finished shard\n")
        return 130
    sys.stdout.write("".join(f"{redact(line)}\n" for line in lines))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
