"""Texts to the tokens that the shards hold: end-of-text behind each document, in the type of the shards."""

from collections.abc import Iterator, Sequence

import numpy as np

from mingpt.data import CharTokenizer, JsonTokenizer, Tokenizer
from mingpt.errors import UserError
from mingpt.prepare.documents import utf8_length

PIECE_CHARACTERS = 1 << 14
GROUP_BYTES = 1 << 20  # encoded at once; the package needs about 100 bytes for a token meanwhile


class Encoder:
    """A tokenizer as this command uses it. Threads may share one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_of_text = tokenizer.end_of_text
        self.dtype = np.dtype("<u2" if len(tokenizer) <= 1 << 16 else "<u4")
        self.can_be_cut = isinstance(tokenizer, CharTokenizer) or (
            isinstance(tokenizer, JsonTokenizer) and tokenizer.can_be_cut
        )

    def split(self, text: str) -> list[str]:
        """The text in pieces with, one after the other, its tokens; the last one may go on behind the text.

        One piece where `can_be_cut` is false, none for an empty text.
        """
        if isinstance(self.tokenizer, JsonTokenizer):
            return list(self.tokenizer.split_text(text, PIECE_CHARACTERS))
        return [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]

    def encode(self, texts: Sequence[str], ends: Sequence[bool]) -> np.ndarray:
        """(tokens,) of all texts, with end-of-text, where there is one, after those that `ends` marks."""
        arrays = self.encode_each(texts)
        if self.end_of_text is not None:
            end = np.array([self.end_of_text], dtype=self.dtype)
            arrays = [
                part
                for tokens, ends_document in zip(arrays, ends, strict=True)
                for part in ((tokens, end) if ends_document else (tokens,))
            ]
        return np.concatenate(arrays, dtype=self.dtype, casting="same_kind")

    def encode_each(self, texts: Sequence[str]) -> list[np.ndarray]:
        if isinstance(self.tokenizer, CharTokenizer):
            return [self.tokenizer.encode("".join(texts))]  # there is no end-of-text to go between them
        if not isinstance(self.tokenizer, JsonTokenizer):
            return [self.tokenizer.encode(text) for text in texts]
        arrays = list[np.ndarray]()
        for group in groups(texts):
            arrays += self.tokenizer.encode_batch(group)
        return arrays

    def first_token_bytes(self, text: str, token: int) -> int:
        """The UTF-8 bytes of `text`, which begins with `token`, that this first token covers."""
        lengths = self.tokenizer.token_bytes()
        if token == self.end_of_text:
            return 0
        if lengths is not None:
            return int(lengths[token])
        from tokenizers import Tokenizer as PackageTokenizer

        package = PackageTokenizer.from_str((self.tokenizer.to_tokenizer_json() or b"").decode())
        package.encode_special_tokens = True
        offsets: list[tuple[int, int]] = package.encode(text, add_special_tokens=False).offsets
        return len(text[: offsets[0][1]].encode()) if offsets else 0


def groups(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    """The texts in order, about GROUP_BYTES at a time."""
    first, size = 0, 0
    for place, text in enumerate(texts):
        size += utf8_length(text)
        if size >= GROUP_BYTES:
            yield texts[first : place + 1]
            first, size = place + 1, 0
    if first < len(texts):
        yield texts[first:]


def content_of(tokenizer: Tokenizer) -> bytes:
    """The tokenizer.json. Raises UserError for a tokenizer that has none."""
    content = tokenizer.to_tokenizer_json()
    if content is None:
        raise UserError(f"a {type(tokenizer).__name__} cannot be written as a tokenizer.json")
    return content
