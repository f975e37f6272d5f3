"""The data of a run: a text or token shards, split for training and validation, as windows of tokens.

Only the training part is for training. But a tokenizer may be made from the whole text. `open_data` returns
TextData or, for a folder, ShardData; both have `train_tokenizer` and `encode`.
"""

import codecs
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import decode_text, read_json
from mingpt.config import DataConfig
from mingpt.data.shards import ShardData, open_shards
from mingpt.data.source import read_bytes, refuse_other_kinds
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer
from mingpt.data.windows import WindowDataset


@dataclass(frozen=True)
class Corpus:
    """The data of a run: windows for training and evaluation, and their tokenizer."""

    train: WindowDataset
    val: WindowDataset
    tokenizer: Tokenizer | None  # None for token shards whose tokenizer is not known
    vocab_size: int  # rows of the embedding; in a new model at least the tokenizer's size
    fingerprint: str  # a hash of the data, 64 hexadecimal digits
    files: Mapping[str, str] = field(default_factory=dict)  # {shard's name: fingerprint}; empty for a text
    val_bytes: int | None = None  # UTF-8 bytes of the validation text; None if unknown
    entropy_floor: float | None = None  # lowest possible validation loss, nats per token; None if unknown


class TextData:
    """The whole text of data.path, before it is split into parts for training and validation.

    `content` has the bytes of the file. Raises UserError if the text is empty, is not UTF-8, or looks like
    UTF-16 or a tar archive.
    """

    def __init__(self, content: bytes, config: DataConfig) -> None:
        try:
            self.text = decode_text(content)
        except ValueError as error:
            raise UserError(f"data.path {config.path} is {error}") from None
        if not self.text:
            raise UserError(f"data.path {config.path} is empty")
        self.files: Mapping[str, str] = {}
        local = local_path(config.resolved_path)
        self.folder = local.parent if local else None
        self.val_fraction = config.val_fraction
        # Without a byte order mark, which is not part of the text. Older versions of this program trained on
        # the mark and hashed it, so the data of their runs have a different hash, and are refused.
        self.fingerprint = hashlib.sha256(content.removeprefix(codecs.BOM_UTF8)).hexdigest()

    def train_tokenizer(self, name: str) -> Tokenizer:
        """Make a tokenizer from the text. `name` is data.tokenizer: a kind in TOKENIZERS, or auto for char.

        Raises KeyError for an unknown kind, and UserError for a kind that is not made from a run's text.
        """
        return TOKENIZERS["char" if name == "auto" else name].train(self.text)

    def encode(self, tokenizer: Tokenizer | None) -> tuple[np.ndarray, np.ndarray, int, int | None]:
        """Return (training tokens, validation tokens, vocabulary size, the validation text's size in bytes).

        `tokenizer` must not be None. Raises UserError if the tokenizer cannot encode the text.
        """
        assert tokenizer is not None, "a text needs a tokenizer"
        n_train = int(len(self.text) * (1 - self.val_fraction))
        val_text = self.text[n_train:]
        train, val = (tokenizer.encode(text) for text in (self.text[:n_train], val_text))
        return train, val, len(tokenizer), len(val_text.encode())


Data = TextData | ShardData


def open_data(config: DataConfig) -> Data:
    """Read the text, or open the token shards, at data.path.

    Raises UserError if the data cannot be used, if data.path has the name of another kind of file, such as
    .jsonl or .gz, or if data.sha256, which is only for a text, is set for token shards.
    """
    folder = local_path(config.path)
    if folder and os.path.isdir(folder):
        if config.sha256 is not None:
            raise UserError(
                "data.sha256 is for a text; token shards have a fingerprint of their own: leave it out"
            )
        return open_shards(folder, config.val_fraction)
    refuse_other_kinds(config.path)
    return TextData(read_bytes(config), config)


def local_path(path: str) -> Path | None:
    """Return `path`, a local path or a file:// or local:// URL, as a Path; None for other URLs."""
    local = path.removeprefix("file://").removeprefix("local://")
    return None if "://" in local else Path(local)


def tokenizer_file(data: Data) -> Path | None:
    """Return the path of the tokenizer.json beside the data.

    Returns None if there is no such file, or if the data are not in a local folder.
    """
    path = data.folder / "tokenizer.json" if data.folder else None
    return path if path and path.is_file() else None


def make_corpus(content: bytes, config: DataConfig) -> Corpus:
    """Return the Corpus of a text, `content`, encoded with a tokenizer that is made from this text.

    Raises UserError for an unusable text or setting, and KeyError if data.tokenizer is neither auto nor in
    TOKENIZERS.
    """
    data = TextData(content, config)
    return tokenize(data, config, data.train_tokenizer(config.tokenizer))


def tokenize(data: Data, config: DataConfig, tokenizer: Tokenizer | None, rows: int | None = None) -> Corpus:
    """Return the Corpus of `data`. A text is encoded with `tokenizer`; shards are tokens already.

    The last `data.val_fraction` of a text is for validation. `rows`, if not None, is the number of embedding
    rows of a model that is trained further. The corpus's `vocab_size` is the first of these that is not None:
    `rows`, `config.vocab_size`, the vocabulary's size.

    Raises UserError if the training or validation part is shorter than a window, if the tokenizer cannot
    encode the text, or if `rows` is None and `config.vocab_size` is less than the tokenizer's size.
    """
    train, val, size, val_bytes = data.encode(tokenizer)
    vocab_size = rows or config.vocab_size or size
    if rows is None and tokenizer is not None and vocab_size < size:
        raise UserError(f"data.vocab_size is {vocab_size}, and the tokenizer has {size} tokens")
    for part, tokens in (("training", train), ("validation", val)):
        if len(tokens) < config.block_size + 1:
            raise UserError(
                f"the {part} part of {config.path} has {len(tokens):,} tokens, fewer than one window "
                f"of data.block_size + 1 = {config.block_size + 1}: use a longer text, a smaller "
                "data.block_size or another data.val_fraction"
            )
    known = vocab_size if tokenizer is None else size
    return Corpus(
        WindowDataset(train, config.block_size, known),
        WindowDataset(val, config.block_size, known),
        tokenizer,
        vocab_size,
        data.fingerprint,
        data.files,
        val_bytes,
        entropy_floor(config, data.fingerprint) if isinstance(tokenizer, CharTokenizer) else None,
    )


def entropy_floor(config: DataConfig, fingerprint: str) -> float | None:
    """Return the lowest possible validation loss of a text, in nats per character; None if it is not known.

    For a text NAME.txt, the loss is in the file NAME.json beside the text. Returns None if the file cannot be
    read or has no such number. Also returns None if the number is for a different val_fraction, or for a text
    with a different hash than `fingerprint`.
    """
    try:
        beside = Path(config.resolved_path.removeprefix("file://")).with_suffix(".json")
        about = read_json(beside)
        matches = about["sha256"] == fingerprint and about["val_fraction"] == config.val_fraction
        return float(about["val_nats_per_character"]) if matches else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # there is no such file, or it has another purpose
