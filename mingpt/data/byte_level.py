"""Byte-level tokenizers: the bytes a token stands for, and where a text may be cut with the same tokens."""

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

# GPT-2's pattern ends a word at every whitespace, and a run of whitespace never begins before its first
# character. After whitespace it looks ahead, and patterns as cl100k's join punctuation and line breaks.
CUT = re.compile(r"(?<=\S)\n")
CUT_IN_A_LINE = re.compile(r"(?<=\S)[\n ]")
KEEPS_TEXT = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # behaviors of Split


def byte_alphabet() -> dict[str, int]:
    """The byte that each of the 256 characters of a byte-level vocabulary stands for, as GPT-2 has them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def decodes_bytes(spec: dict[str, Any]) -> bool:
    """Whether the text of tokens is that of their bytes, one after the other; `spec` is a tokenizer.json."""
    return [part.get("type") for part in parts_of(spec.get("decoder"), "decoders")] == ["ByteLevel"]


def encodes_bytes(spec: dict[str, Any]) -> bool:
    """Whether the tokens of any text have its UTF-8 bytes; `spec` is a tokenizer.json with a BPE."""
    *before, last = parts_of(spec.get("pre_tokenizer"), "pretokenizers") or [{}]
    model = spec["model"]
    return (
        decodes_bytes(spec)
        and spec.get("normalizer") is None
        and last.get("type") == "ByteLevel"
        and not last.get("add_prefix_space", True)
        and all(part.get("type") == "Split" and part.get("behavior") in KEEPS_TEXT for part in before)
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and byte_alphabet().keys() <= model["vocab"].keys()
        and all(has_own_bytes(token, model) for token in added_tokens(spec))
    )


def has_own_bytes(token: dict[str, Any], model: dict[str, Any]) -> bool:
    """Whether an added token always has the bytes that `token_bytes` gives it.

    These are its UTF-8 bytes; none if it is special, so that no plain text may become that token.
    """
    content, alphabet = token["content"], byte_alphabet()
    if not token.get("special"):
        is_alike = content not in model["vocab"] or bytes_of_token(content, alphabet) == content.encode()
        return is_alike and not token.get("lstrip") and not token.get("rstrip")
    if content not in model["vocab"]:
        return True
    merged = ("".join(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"])
    return not model.get("ignore_merges") and content not in alphabet and content not in merged


def can_be_cut(spec: dict[str, Any]) -> bool:
    """Whether the pieces of `split_text` have, one after the other, the tokens of the whole text."""
    split = spec.get("pre_tokenizer") or {}
    return (
        spec.get("normalizer") is None
        and split.get("type") == "ByteLevel"
        and not split.get("add_prefix_space", True)
        and split.get("use_regex", True)
        and not any(
            token.get("rstrip") or CUT_IN_A_LINE.search(token["content"]) for token in added_tokens(spec)
        )
    )


def parts_of(part: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """The members of a Sequence, or the part itself."""
    if part is None:
        return []
    return part[name] if part.get("type") == "Sequence" else [part]


def added_tokens(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return spec.get("added_tokens") or []


def split_text(text: str, size: int) -> Iterator[str]:
    """Pieces of `size` characters or somewhat more, each but the first beginning with a line break.

    A line longer than `size` is cut at a space. A text without whitespace stays whole.
    """
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + size, start + 2 * size) or CUT_IN_A_LINE.search(text, start + size)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


def bytes_of_token(token: str, alphabet: dict[str, int]) -> bytes:
    """The bytes that a token of the vocabulary stands for: itself, where it has other characters."""
    codes = [alphabet.get(character) for character in token]
    return token.encode() if None in codes else bytes(code for code in codes if code is not None)


def text_of_bytes(pieces: Iterable[bytes]) -> Iterator[str]:
    """The text so far decodable after each piece; bytes that are no UTF-8 become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for piece in pieces:
        yield decoder.decode(piece)
    yield decoder.decode(b"", final=True)


def look_up(table: Sequence[bytes], token: int) -> bytes:
    """A token's bytes; none for a token past the vocabulary, which a model with a wider output may draw."""
    return table[token] if 0 <= token < len(table) else b""
