"""What trainer, resume, sample.py and export know of a tokenizer.

Each kind is a file of its own, registered by name in TOKENIZERS: characters in char_tokenizer.py, any
tokenizer.json in json_tokenizer.py.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence

import numpy as np


class Tokenizer(ABC):
    """Text to tokens and back, and to the bytes that a snapshot carries."""

    stored_as_tensor = False  # whether a snapshot carries them among its tensors: too many for its manifest

    @classmethod
    @abstractmethod
    def train(cls, text: str) -> "Tokenizer":
        """The tokenizer for a text. Raises UserError for a kind that is not made from the run's text."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> "Tokenizer":
        """The inverse of `to_bytes`. Raises ValueError for other bytes."""

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

    def decode_pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come, in pieces of whole characters; joined, it is that of `decode`."""
        for token in tokens:
            yield self.decode([token])

    def token_bytes(self) -> np.ndarray | None:
        """(vocabulary,) int64: for each token the UTF-8 bytes of text that it stands for, 0 for special ones.

        None where that is not a property of the token alone.
        """
        return None

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document, if there is one."""
        return None

    def default_prompt(self) -> list[int]:
        """What a sample begins with where no prompt is given; at least one token."""
        end = self.end_of_text
        return self.encode("\n").tolist() if end is None else [end]

    def to_tokenizer_json(self) -> bytes | None:
        """The content of a tokenizer.json for Hugging Face's tokenizers; None where it cannot be said so."""
        return None

    def matching_tokens(self, other: "Tokenizer") -> dict[int, int]:
        """{token here: the same token in `other`}, for embedding rows taken over from another run."""
        same = self.fingerprint() == other.fingerprint()
        return {token: token for token in range(len(self))} if same else {}

    def fingerprint(self) -> str:
        """The same string for tokenizers that encode alike."""
        return hashlib.sha256(type(self).__name__.encode() + self.to_bytes()).hexdigest()


TOKENIZERS: dict[str, type[Tokenizer]] = {}  # by kind; `data.tokenizer` may name one


def kind_of(tokenizer: Tokenizer) -> str:
    """The name under which its class is registered."""
    return next(kind for kind, registered in TOKENIZERS.items() if type(tokenizer) is registered)


def load_tokenizer(kind: str, content: bytes) -> Tokenizer:
    """The tokenizer that a snapshot carries. Raises ValueError for another kind, or other bytes."""
    if kind not in TOKENIZERS:
        raise ValueError(f"there is no tokenizer {kind!r}; there are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind].from_bytes(content)
