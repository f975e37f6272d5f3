"""The data of a run as tokens, split into training and validation: from a text, or from token shards.

The split comes first: no character or token of the validation part is ever trained on.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.config import DataConfig
from mingpt.data.char_tokenizer import CharTokenizer
from mingpt.data.shards import ShardData
from mingpt.data.source import hint_to_prepare
from mingpt.data.tokenizer import TOKENIZERS, Tokenizer
from mingpt.data.windows import CharDataset
from mingpt.errors import UserError

GPT2_VOCABULARY = 50257  # tokens; of shards that have no tokenizer


@dataclass(frozen=True)
class Corpus:
    """What is trained on and evaluated."""

    train: CharDataset
    val: CharDataset
    tokenizer: Tokenizer | None
    vocab_size: int  # rows of the embedding; at least the tokenizer's size
    fingerprint: str  # of the data, 64 hexadecimal digits
    files: Mapping[str, str] = field(default_factory=dict)  # token shards and their fingerprints
    val_bytes: int | None = None  # of UTF-8 in the validation text after its first token
    entropy_floor: float | None = None  # nats per token of the validation part, where they are known


class TextData:
    """A text: its tail is the validation part. Raises UserError for one that is empty or not UTF-8."""

    def __init__(self, content: bytes, config: DataConfig) -> None:
        if not content:
            raise UserError(f"data.path {config.path} is empty")
        if config.path.endswith((".jsonl", ".ndjson")):
            raise UserError(f"data.path {config.path} is no text{hint_to_prepare(config.path)}")
        try:
            self.text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            byte, offset = content[error.start], error.start
            raise UserError(
                f"data.path {config.path} is not UTF-8, byte 0x{byte:02x} at offset {offset:,}"
                f"{hint_to_prepare(config.path)}"
            ) from None
        self.files: Mapping[str, str] = {}
        self.fingerprint = hashlib.sha256(content).hexdigest()


Data = TextData | ShardData


def make_corpus(content: bytes, config: DataConfig) -> Corpus:
    """A text with a tokenizer of its own. Raises UserError for a text that cannot be used."""
    data = TextData(content, config)
    return tokenize(data, config, train_tokenizer(data, config))


def tokenize(data: Data, config: DataConfig, tokenizer: Tokenizer | None, rows: int | None = None) -> Corpus:
    """The tokens of the data, with the tokenizer that goes with it; a text needs one.

    `rows` of the embedding are those of the model to go on with, if there is one. Raises UserError for data
    that is too short for the split, or that the tokenizer cannot encode.
    """
    meta = data.meta if isinstance(data, ShardData) else None
    vocab_size = rows or vocabulary_size(config, tokenizer, meta)
    if isinstance(data, ShardData):
        val_bytes = meta["val_bytes"] if meta else None
        known = vocab_size if tokenizer is None else len(tokenizer)
        parts = [CharDataset(part, config.block_size, known) for part in (data.train, data.val)]
    else:
        assert tokenizer is not None, "a text needs a tokenizer"
        n_train = int(len(data.text) * (1 - config.val_fraction))
        val_text = data.text[n_train:]
        tokens = [tokenizer.encode(text) for text in (data.text[:n_train], val_text)]
        val_bytes = len(val_text.encode()) - len(tokenizer.decode(tokens[1][:1].tolist()).encode())
        parts = [CharDataset(part, config.block_size) for part in tokens]
    for part, dataset in zip(("training", "validation"), parts, strict=True):
        if len(dataset.tokens) < config.block_size + 1:
            raise UserError(
                f"the {part} part of {config.path} has {len(dataset.tokens):,} tokens, fewer than one window "
                f"of data.block_size + 1 = {config.block_size + 1}: use a longer text, a smaller "
                "data.block_size or another data.val_fraction"
            )
    floor = entropy_floor(config, data.fingerprint) if isinstance(tokenizer, CharTokenizer) else None
    train, val = parts
    return Corpus(train, val, tokenizer, vocab_size, data.fingerprint, data.files, val_bytes, floor)


def train_tokenizer(data: TextData, config: DataConfig) -> Tokenizer:
    """A tokenizer for this text, of the kind that `data.tokenizer` names; characters for auto."""
    return TOKENIZERS["char" if config.tokenizer == "auto" else config.tokenizer].train(data.text)


def vocabulary_size(config: DataConfig, tokenizer: Tokenizer | None, meta: dict[str, Any] | None) -> int:
    """Rows of a new model's embedding; `meta` is what meta.json says of shards. Raises UserError.

    There must be one for each token of the tokenizer.
    """
    size = meta["tokenizer"]["vocab_size"] if meta else GPT2_VOCABULARY
    size = size if tokenizer is None else len(tokenizer)
    if tokenizer is not None and config.vocab_size is not None and config.vocab_size < size:
        raise UserError(f"data.vocab_size is {config.vocab_size}, and the tokenizer has {size} tokens")
    return config.vocab_size or size


def entropy_floor(config: DataConfig, fingerprint: str) -> float | None:
    """Nats per character from the .json beside the text, if it describes this text and this split."""
    beside = Path(config.path.removeprefix("file://")).with_suffix(".json")
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        matches = about["sha256"] == fingerprint and about["val_fraction"] == config.val_fraction
        return float(about["val_nats_per_character"]) if matches else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is no such file, or it has another purpose
