"""A text as arrays of tokens: split into training and validation first, then encoded.

The tail of the text is the validation part; no character of it is ever trained on. Each part is one array of
the smallest integer type.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from mingpt.config import DataConfig
from mingpt.data.tokenizer import TOKENIZERS, Tokenizer
from mingpt.data.windows import CharDataset
from mingpt.errors import UserError


@dataclass(frozen=True)
class Corpus:
    """A text, split and encoded. `fingerprint` is the SHA-256 of its bytes in hex."""

    train: CharDataset
    val: CharDataset
    tokenizer: Tokenizer
    fingerprint: str
    val_bytes: int  # UTF-8 length of the validation text that is predicted: all but its first token
    entropy_floor: float | None  # nats per token of the validation part, where they are known


def make_corpus(content: bytes, config: DataConfig) -> Corpus:
    """Split and encode. Raises UserError for a text that is empty, too short for the split, or not UTF-8."""
    if not content:
        raise UserError(f"data.path {config.path} is empty")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        byte, offset = content[error.start], error.start
        raise UserError(
            f"data.path {config.path} is not UTF-8: byte 0x{byte:02x} at offset {offset:,}"
        ) from None
    tokenizer = TOKENIZERS["char" if config.tokenizer == "auto" else config.tokenizer].train(text)
    n_train = int(len(text) * (1 - config.val_fraction))
    train, val = tokenizer.encode(text[:n_train]), tokenizer.encode(text[n_train:])
    for part, tokens in (("training", train), ("validation", val)):
        if len(tokens) < config.block_size + 1:
            raise UserError(
                f"the {part} part of {config.path} has {len(tokens):,} tokens, fewer than one window of "
                f"data.block_size + 1 = {config.block_size + 1}: use a longer text, a smaller "
                "data.block_size or another data.val_fraction"
            )
    fingerprint = hashlib.sha256(content).hexdigest()
    return Corpus(
        CharDataset(train, config.block_size),
        CharDataset(val, config.block_size),
        tokenizer,
        fingerprint,
        len(tokenizer.decode(val[1:].tolist()).encode()),
        entropy_floor(config, fingerprint),
    )


def entropy_floor(config: DataConfig, fingerprint: str) -> float | None:
    """Nats per character from the .json beside the text, if it describes this text and this split."""
    beside = Path(config.path.removeprefix("file://")).with_suffix(".json")
    try:
        about = json.loads(beside.read_text(encoding="utf-8"))
        matches = about["sha256"] == fingerprint and about["val_fraction"] == config.val_fraction
        return (
            float(about["val_nats_per_character"])
            if matches and config.tokenizer in ("auto", "char")
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is no such file, or it has another purpose
