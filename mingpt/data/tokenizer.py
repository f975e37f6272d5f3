"""Tokenizers: text to tokens and back, and to the bytes that a snapshot carries."""

import hashlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mingpt.errors import UserError


class Tokenizer(ABC):
    """What trainer, resume and sample.py know of a tokenizer. Registered by name in TOKENIZERS."""

    @classmethod
    @abstractmethod
    def train(cls, text: str) -> "Tokenizer":
        """The tokenizer for a text."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> "Tokenizer":
        """The inverse of `to_bytes`."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """All of the tokenizer as UTF-8 text; a snapshot carries it."""

    @abstractmethod
    def __len__(self) -> int:
        """The size of the vocabulary."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """(tokens,) of the smallest unsigned type. Raises UserError for text that cannot be encoded."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens."""

    def default_prompt(self) -> str:
        """What a sample begins with where no prompt is given; at least one token."""
        return "\n"

    def matching_tokens(self, other: "Tokenizer") -> dict[int, int]:
        """{token here: the same token in `other`}, for embedding rows taken over from another run."""
        same = self.fingerprint() == other.fingerprint()
        return {token: token for token in range(len(self))} if same else {}

    def fingerprint(self) -> str:
        """The same string for tokenizers that encode alike."""
        return hashlib.sha256(type(self).__name__.encode() + self.to_bytes()).hexdigest()


class CharTokenizer(Tokenizer):
    """One token per character: its place among a text's distinct characters in code-point order."""

    def __init__(self, characters: str) -> None:
        if not 0 < len(characters) <= sys.maxunicode + 1:
            raise ValueError(f"a vocabulary cannot have {len(characters)} characters")
        codes = np.frombuffer(characters.encode("utf-32-le"), dtype=np.uint32)
        if not (codes[:-1] < codes[1:]).all():
            raise ValueError("the characters of a vocabulary must be distinct and in code-point order")
        self.characters = characters
        self._codes = codes

    @classmethod
    def train(cls, text: str) -> "CharTokenizer":
        return cls("".join(sorted(set(text))))

    @classmethod
    def from_bytes(cls, content: bytes) -> "CharTokenizer":
        return cls(content.decode())

    def to_bytes(self) -> bytes:
        return self.characters.encode()

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> np.ndarray:
        """(len(text),) tokens. Raises UserError naming the first character that is not in the vocabulary."""
        codes = np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)
        dtype = np.min_scalar_type(len(self) - 1)
        table = np.zeros(int(max(codes.max(initial=0), self._codes[-1])) + 1, dtype=dtype)
        table[self._codes] = np.arange(len(self), dtype=dtype)
        tokens = table[codes]
        unknown = np.flatnonzero(self._codes[tokens] != codes)
        if len(unknown):
            character = text[unknown[0]]
            raise UserError(
                f"the character {character!r} (U+{ord(character):04X}) is not in the vocabulary of the "
                f"{len(self)} characters trained on"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.characters[token] for token in tokens)

    def default_prompt(self) -> str:
        return "\n" if "\n" in self.characters else self.characters[0]

    def matching_tokens(self, other: Tokenizer) -> dict[int, int]:
        if not isinstance(other, CharTokenizer):
            return super().matching_tokens(other)
        theirs = {character: token for token, character in enumerate(other.characters)}
        return {token: theirs[char] for token, char in enumerate(self.characters) if char in theirs}


# By the name in `data.tokenizer`; auto is the first one.
TOKENIZERS: dict[str, type[Tokenizer]] = {
    "char": CharTokenizer,
}


def tokenizer_class(name: str) -> type[Tokenizer]:
    return TOKENIZERS[next(iter(TOKENIZERS)) if name == "auto" else name]


def load_tokenizer(name: str, content: bytes) -> Tokenizer:
    """The tokenizer that a snapshot carries, from `data.tokenizer` of its configuration and its bytes."""
    return tokenizer_class(name).from_bytes(content)
