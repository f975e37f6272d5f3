"""Encode text once, into shards of tokens.

    python -m mingpt prepare TEXT_OR_URL... --out DIR [--tokenizer char|bpe|gpt2|PATH] [...]
    python -m mingpt prepare --check DIR

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

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.base.command import CommandParser, write_lines
from mingpt.base.errors import UserError
from mingpt.data.shard_files import ShardFile, inspect, read_meta
from mingpt.tools.prepare.folder import META, PARTIAL, TOKENIZER, read_through
from mingpt.tools.prepare.job import Options, prepare


@dataclass
class Findings:
    """What is wrong, a sentence each that names the file; and what is there."""

    problems: list[str] = field(default_factory=list)
    tokens: int = 0
    files: int = 0
    largest: int = -1  # token


def check_folder(folder: Path) -> tuple[bool, list[str]]:
    """Whether all is well, and lines that say so. Raises UserError if there is no such folder."""
    if not folder.is_dir():
        raise UserError(f"--check {folder} is no folder")
    found = Findings()
    try:
        meta = read_meta(folder)
    except UserError as error:
        return False, [str(error)]
    if meta is None:
        check_without_meta(folder, found)
    else:
        check_prepared(folder, meta, found)
    whole = f"{folder}: {found.tokens:,} tokens in {found.files} files, largest token {found.largest}"
    return not found.problems, found.problems or [whole]


def check_prepared(folder: Path, meta: dict[str, Any], found: Findings) -> None:
    """Everything that meta.json says of the folder."""
    listed = [file["name"] for file in meta["files"]]
    for file in meta["files"]:
        check_file(folder / file["name"], file, meta["tokenizer"]["vocab_size"], found)
    for path in sorted(folder.glob("*.bin")):
        if path.name not in listed:
            found.problems.append(f"{path}: {META} does not list it")
    expected = meta["tokenizer"]["sha256"]
    path = folder / TOKENIZER
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if expected is not None else None
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    if digest != expected:
        found.problems.append(f"{path}: sha256 is {digest}, and {META} says {expected}")


def check_file(path: Path, file: dict[str, Any], vocab_size: int, found: Findings) -> None:
    try:
        info = inspect(str(path), None)
        digest, largest = read_through(path, info)
    except OSError as error:
        found.problems.append(f"{path}: cannot be read: {error.strerror}")
        return
    except UserError as error:
        found.problems.append(str(error))
        return
    add(found, info, largest)
    if info.tokens != file["tokens"]:
        found.problems.append(f"{path}: {info.tokens:,} tokens, and {META} says {file['tokens']:,}")
    if largest >= vocab_size:
        found.problems.append(f"{path}: holds token {largest}, and the vocabulary has {vocab_size}")
    if digest != file["sha256"]:
        found.problems.append(f"{path}: sha256 is {digest}, and {META} says {file['sha256']}")


def check_without_meta(folder: Path, found: Findings) -> None:
    """Shards of other programs: headers, sizes and the largest token."""
    paths = sorted(folder.glob("*.bin"))
    if not paths:
        partial = any(path.name.endswith(PARTIAL) for path in folder.iterdir())
        found.problems.append(f"{folder}: holds no .bin file" + (", only unfinished ones" if partial else ""))
    for path in paths:
        try:
            info = inspect(str(path), None)
            add(found, info, read_through(path, info)[1])
        except OSError as error:
            found.problems.append(f"{path}: cannot be read: {error.strerror}")
        except UserError as error:
            found.problems.append(str(error))


def add(found: Findings, info: ShardFile, largest: int) -> None:
    found.tokens += info.tokens
    found.files += 1
    found.largest = max(found.largest, largest)


def make_parser() -> CommandParser:
    default = Options()
    usage = "%(prog)s TEXT_OR_URL... --out DIR [options] | --check DIR"
    parser = CommandParser("python -m mingpt prepare", __doc__, usage)
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


def run(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether all is well, and what to print. Raises UserError."""
    arguments = make_parser().parse_args(words)
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


def main(arguments: Sequence[str]) -> int:
    try:
        is_good, lines = run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted: the same command goes on from the last finished shard\n")
        return 130
    write_lines(lines)
    return 0 if is_good else 1
