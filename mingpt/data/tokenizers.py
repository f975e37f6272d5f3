"""The interface of a tokenizer, for training, snapshots, sampling and export; a tokenizer of characters.

TOKENIZERS maps each kind of tokenizer, such as "char", to a class. json_tokenizer.py has
JsonTokenizer, which needs the package `tokenizers`.
"""

import contextlib
import hashlib
import json
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import parse_json


class Tokenizer(ABC):
    """A tokenizer. It encodes text, decodes tokens, and can be stored as bytes, in a snapshot for example."""

    @classmethod
    @abstractmethod
    def train(cls, text: str) -> "Tokenizer":
        """Make a tokenizer from the run's text.

        Raises UserError if tokenizers of this class are not made from a text.
        """

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> "Tokenizer":
        """Return the tokenizer whose `to_bytes` returned `content`.

        Raises ValueError if `content` cannot be used, or if a package that the class needs is missing.
        """

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return all of the tokenizer as bytes, for a file in a snapshot."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the size of the vocabulary: the highest token + 1."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, (tokens,), in the smallest unsigned dtype for this vocabulary.

        Raises UserError if the text cannot be encoded.
        """

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return a list of the tokens of each text, as `encode` returns them."""
        return [self.encode(text) for text in texts]

    def split(self, text: str) -> Iterable[str]:
        """Split a text into pieces whose tokens, concatenated, are the tokens of the whole text."""
        return [text]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, without special tokens; bytes that are not UTF-8 become U+FFFD."""

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document; None if no such token is known."""
        return None

    def default_prompt(self) -> list[int]:
        """Return the tokens that a sample without a prompt begins with.

        The result is [end_of_text], else the tokens of a line break, else [0].
        """
        if self.end_of_text is not None:
            return [self.end_of_text]
        with contextlib.suppress(UserError):  # a line break without a token
            return self.encode("\n").tolist() or [0]
        return [0]

    def to_tokenizer_json(self) -> bytes | None:
        """Return a tokenizer.json for Hugging Face's tokenizers; None if this class makes no such file."""
        return None

    def fingerprint(self) -> str:
        """Return a SHA-256 in hex, the same for tokenizers of the same class and content."""
        return hashlib.sha256(type(self).__name__.encode() + self.to_bytes()).hexdigest()


TOKENIZERS: dict[str, type[Tokenizer]] = {}  # {kind, such as "char": class}; data.tokenizer may be a kind


def kind_of(tokenizer: Tokenizer) -> str:
    """Return the key of the tokenizer's class in TOKENIZERS, such as "char"."""
    return next(kind for kind, registered in TOKENIZERS.items() if type(tokenizer) is registered)


def load_tokenizer(kind: str, content: bytes) -> Tokenizer:
    """Return the tokenizer of this kind (a key of TOKENIZERS) whose `to_bytes` returned `content`.

    Raises ValueError for an unknown kind or unusable content, or if a package that the kind needs is missing.
    """
    if kind not in TOKENIZERS:
        raise ValueError(f"there is no tokenizer {kind!r}; there are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind].from_bytes(content)


class CharTokenizer(Tokenizer):
    """A tokenizer with one token per character: the character's index in the sorted `characters`.

    Raises ValueError if `characters` is empty, has a lone surrogate, or is not in the order of code points,
    each once.
    """

    def __init__(self, characters: str) -> None:
        codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
        if not characters or (codes[:-1] >= codes[1:]).any():
            raise ValueError("a vocabulary has at least one character, each once, in code-point order")
        self.characters = characters
        self._codes = codes

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, content: bytes) -> "CharTokenizer":
        tokenizer = None
        with contextlib.suppress(ValueError, TypeError, KeyError):
            tokenizer = cls("".join(parse_json(content)["model"]["vocab"]))
        if tokenizer is None or tokenizer.to_bytes() != content:
            raise ValueError("this is not a tokenizer.json of characters")
        return tokenizer

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, (len(text),).

        Raises UserError if a character is not in the vocabulary; the message names the character.
        """
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        dtype = np.min_scalar_type(len(self) - 1)
        table = np.zeros(int(max(codes.max(initial=0), self._codes[-1])) + 1, dtype=dtype)
        table[self._codes] = np.arange(len(self), dtype=dtype)
        tokens = table[codes]
        unknown = np.flatnonzero(self._codes[tokens] != codes)
        if len(unknown):
            character = text[unknown[0]]
            name = unicodedata.name(character, "without a name")
            raise UserError(
                f"the character {character!r} (U+{ord(character):04X}, {name}) is not in the vocabulary of "
                f"the {len(self)} characters trained on"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def to_bytes(self) -> bytes:
        """Return a tokenizer.json whose model is a WordLevel with a word per character."""
        every_character = {"Regex": r"[\s\S]"}
        split = {"type": "Split", "pattern": every_character, "behavior": "Isolated", "invert": False}
        vocab = {character: token for token, character in enumerate(self.characters)}
        spec: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": split,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "<unk>"},
        }
        return json.dumps(spec, ensure_ascii=False, indent=1).encode()

    to_tokenizer_json = to_bytes


TOKENIZERS["char"] = CharTokenizer
