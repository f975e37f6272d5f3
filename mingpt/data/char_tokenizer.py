"""One token per character."""

import json
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from mingpt.data.tokenizer import TOKENIZERS, Tokenizer
from mingpt.errors import UserError


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
            tokenizer = cls("".join(json.loads(content)["model"]["vocab"]))
        except (ValueError, TypeError, KeyError, RecursionError):
            return None
        return tokenizer if tokenizer.to_tokenizer_json() == content else None

    def matching_tokens(self, other: Tokenizer) -> dict[int, int]:
        if not isinstance(other, CharTokenizer):
            return super().matching_tokens(other)
        theirs = {character: token for token, character in enumerate(other.characters)}
        return {token: theirs[char] for token, char in enumerate(self.characters) if char in theirs}


TOKENIZERS["char"] = CharTokenizer
