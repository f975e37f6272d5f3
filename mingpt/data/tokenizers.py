"""What trainer, resume, sample.py and export know of a tokenizer, and the one of characters.

A kind of tokenizer is registered by name in TOKENIZERS; json_tokenizer.py has any tokenizer.json.
"""

import hashlib
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import parse_json


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

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def first_token_bytes(self, text: str) -> int:
        """The UTF-8 bytes of `text` that its first token covers."""
        return len(self.decode(self.encode(text)[:1].tolist()).encode())

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

    def loses(self, text: str) -> bool:
        """Whether the tokens of `text` do not have all of it, but for blanks at its ends."""
        return False

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

    def tokens_by_meaning(self) -> dict[Any, int]:
        """{what a token stands for: the token}, the same in other tokenizers of its kind.

        Embedding rows taken over from another run follow it. Here tokens mean the same in this one alone.
        """
        return {(self.fingerprint(), token): token for token in range(len(self))}

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

    def token_bytes(self) -> np.ndarray:
        codes = self._codes[:, np.newaxis]  # two bytes from U+0080 on, and so forth
        return 1 + (codes >= np.array([0x80, 0x800, 0x10000])).sum(axis=1)

    def default_prompt(self) -> list[int]:
        return self.encode("\n" if "\n" in self.characters else self.characters[0]).tolist()

    def to_tokenizer_json(self) -> bytes:
        """One word per character: WordLevel behind a split at every character."""
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

    @classmethod
    def from_tokenizer_json(cls, content: bytes) -> "CharTokenizer | None":
        """The inverse of `to_tokenizer_json`; None for any other content."""
        try:
            tokenizer = cls("".join(parse_json(content)["model"]["vocab"]))
        except (ValueError, TypeError, KeyError):
            return None
        return tokenizer if tokenizer.to_tokenizer_json() == content else None

    def tokens_by_meaning(self) -> dict[Any, int]:
        return {character: token for token, character in enumerate(self.characters)}


TOKENIZERS["char"] = CharTokenizer
