"""The vocabulary and the number of training tokens, without reading more of the data than they need."""

from pathlib import Path
from typing import NamedTuple

from mingpt.config import Config
from mingpt.data import (
    TOKENIZERS,
    ShardData,
    Tokenizer,
    is_shards,
    local_path,
    open_shards,
    read_bytes,
    read_named_tokenizer,
    train_tokenizer,
)
from mingpt.data.json_tokenizer import parse_tokenizer_json
from mingpt.data.tokens import TextData, vocabulary_size
from mingpt.errors import UserError


class DataSize(NamedTuple):
    """`train_tokens` is None where it is not known."""

    vocab_size: int
    train_tokens: int | None


def measure_data(config: Config) -> DataSize:
    """As mingpt.corpus would choose the tokenizer. Raises UserError if the vocabulary cannot be known.

    With data.vocab_size given, data that cannot be read is no error.
    """
    data, given = config.data, config.data.vocab_size
    try:
        if is_shards(data.path):
            return measure_shards(config)
        if given is not None and local_path(data.path) is None:
            return DataSize(given, None)  # nothing is downloaded for a count
        return measure_text(config)
    except UserError as error:
        if given is not None:
            return DataSize(given, None)
        raise UserError(f"{error}; data.vocab_size=N plans without the data") from None


def measure_shards(config: Config) -> DataSize:
    """Headers and sizes of the files are read, no token."""
    data = open_shards(config.data.path, config.data.val_fraction)
    return DataSize(rows(config, named_tokenizer(config, data.folder), data), len(data.train))


def measure_text(config: Config) -> DataSize:
    """The text is read, and encoded if it has a tokenizer.json."""
    data = TextData(read_bytes(config.data), config.data)
    path = local_path(config.data.path)
    tokenizer = named_tokenizer(config, Path(path).parent if path else None)
    characters = int(len(data.text) * (1 - config.data.val_fraction))
    if tokenizer is None:
        return DataSize(rows(config, train_tokenizer(data, config.data), None), characters)
    return DataSize(rows(config, tokenizer, None), len(tokenizer.encode(data.text[:characters])))


def named_tokenizer(config: Config, folder: Path | None) -> Tokenizer | None:
    """That of data.tokenizer, or the tokenizer.json in the folder of the data. Raises UserError."""
    name = config.data.tokenizer
    if name == "auto":
        beside = folder / "tokenizer.json" if folder else None
        if beside is None or not beside.is_file():
            return None
        name = str(beside)
    elif name in TOKENIZERS:
        return None
    try:
        return parse_tokenizer_json(read_named_tokenizer(name))
    except ValueError as error:
        raise UserError(f"data.tokenizer {name} cannot be used: {error}") from None


def rows(config: Config, tokenizer: Tokenizer | None, data: ShardData | None) -> int:
    """Of the embedding. Raises UserError where they are those of other weights, which are not read here."""
    if config.snapshot.init_from and config.data.vocab_size is None and config.data.tokenizer == "auto":
        raise UserError(
            "with snapshot.init_from the vocabulary is that of these weights, which a plan does not read"
        )
    return vocabulary_size(config.data, tokenizer, data.meta if data else None)
