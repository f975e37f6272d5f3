"""Define the interface of a tokenizer for trainer, resume, sample.py and export; tokenize by characters.

TOKENIZERS has each kind of tokenizer by name. json_tokenizer.py reads any tokenizer.json.
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
    """Encodes text to tokens, decodes them, and turns itself into bytes for a snapshot."""

    stored_as_tensor = False  # whether a snapshot keeps the bytes as a tensor: too many for its manifest

    @classmethod
    @abstractmethod
    def train(cls, text: str) -> "Tokenizer":
        """Make the tokenizer for a text. Raises UserError for a kind that is not made from the run's text."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> "Tokenizer":
        """The tokenizer whose `to_bytes` gave this content. ValueError for other bytes or no package."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The whole tokenizer as UTF-8 text, for a snapshot."""

    @abstractmethod
    def __len__(self) -> int:
        """The size of the vocabulary: the highest token + 1."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Encode a text as (tokens,) in the smallest unsigned type. UserError if it cannot be encoded."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The tokens of each text; see `encode`."""
        return [self.encode(text) for text in texts]

    def first_token_bytes(self, text: str) -> int:
        """The number of UTF-8 bytes of `text` that its first token covers; 0 if it has no token."""
        return len(self.decode(self.encode(text)[:1].tolist()).encode())

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens below len(self) without special tokens; bytes that are not UTF-8 give U+FFFD."""

    def decode_pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """Yield the text of tokens as they arrive, in whole characters; joined, the result of `decode`."""
        for token in tokens:
            yield self.decode([token])

    def token_bytes(self) -> np.ndarray | None:
        """The number of UTF-8 bytes that each token stands for, (vocabulary,) int64; 0 for special tokens.

        None where the number does not depend on the token alone.
        """
        return None

    def loses(self, text: str) -> bool:
        """Whether the tokens of `text`, or of its beginning, lack more than whitespace at its ends."""
        return False

    @property
    def end_of_text(self) -> int | None:
        """The token that ends a document, if there is one."""
        return None

    def default_prompt(self) -> list[int]:
        """The tokens that a sample begins with if no prompt is given: the end-of-text, else a line break.

        It is token 0 for a tokenizer without an end-of-text that drops line breaks.
        """
        end = self.end_of_text
        return [end] if end is not None else self.encode("\n").tolist() or [0]

    def to_tokenizer_json(self) -> bytes | None:
        """The content of a tokenizer.json for Hugging Face's tokenizers; None if there is no such form."""
        return None

    def tokens_by_meaning(self) -> dict[Any, int]:
        """{a token's meaning: token}. If a run starts with other weights, embedding rows follow the meanings.

        By default a token means the same only in tokenizers with the same fingerprint.
        """
        return {(self.fingerprint(), token): token for token in range(len(self))}

    def fingerprint(self) -> str:
        """A SHA-256 in hex, the same for tokenizers of the same kind and content."""
        return hashlib.sha256(type(self).__name__.encode() + self.to_bytes()).hexdigest()


TOKENIZERS: dict[str, type[Tokenizer]] = {}  # by kind, which `data.tokenizer` may name


def kind_of(tokenizer: Tokenizer) -> str:
    """The name under which the tokenizer's class is registered."""
    return next(kind for kind, registered in TOKENIZERS.items() if type(tokenizer) is registered)


def load_tokenizer(kind: str, content: bytes) -> Tokenizer:
    """The tokenizer of this kind whose `to_bytes` gave `content`, as a snapshot carries it.

    Raises ValueError for an unknown kind, for other bytes, or if a package that it needs is missing.
    """
    if kind not in TOKENIZERS:
        raise ValueError(f"there is no tokenizer {kind!r}; there are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[kind].from_bytes(content)


class CharTokenizer(Tokenizer):
    """One token per character: its place among the distinct ones of the text trained on, by code point."""

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
        """The tokens, (len(text),). Raises UserError naming the first character outside of the vocabulary."""
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
        """A tokenizer.json with one word per character: WordLevel after a split at every character."""
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
        """The tokenizer whose `to_tokenizer_json` gave this content; None for any other content."""
        try:
            tokenizer = cls("".join(parse_json(content)["model"]["vocab"]))
        except (ValueError, TypeError, KeyError):
            return None
        return tokenizer if tokenizer.to_tokenizer_json() == content else None

    def tokens_by_meaning(self) -> dict[Any, int]:
        return {character: token for token, character in enumerate(self.characters)}


TOKENIZERS["char"] = CharTokenizer
