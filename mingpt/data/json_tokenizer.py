"""Any Hugging Face tokenizer.json, run by the `tokenizers` package, which is imported when one is made.

Of byte-level tokenizers it is known which bytes a token stands for, and where a text may be cut and still
have the same tokens.
"""

import codecs
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as PackageTokenizer

# GPT-2's pattern ends a word at every whitespace, and a run of whitespace never begins before its first
# character. After whitespace it looks ahead, and patterns as cl100k's join punctuation and line breaks.
CUT = re.compile(r"(?<=\S)\n")
CUT_IN_A_LINE = re.compile(r"(?<=\S)[\n ]")
KEEPS_TEXT = ("Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous")  # behaviors of Split
END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>")
CHUNK_CHARACTERS = 1 << 16
CHUNKS_AT_ONCE = 16  # the package needs about 100 bytes for a token while it encodes
MAX_TOKENS = 1 << 24  # memory is taken for each number up to the highest


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


class JsonTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes.

    Encoding adds no special tokens, and those that the text spells are plain text. The file's settings for
    truncation, padding and dropout do not act.
    """

    stored_as_tensor = True
    can_be_cut: bool  # whether `split_text` cuts

    def __init__(self, content: bytes) -> None:
        """Raises ValueError for content that cannot be used, UserError if the package is missing."""
        self._content = content
        self._tokenizer = load_with_package(content)
        spec: dict[str, Any] = json.loads(content)
        self._is_special = {
            token: added.special for token, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise ValueError("the vocabulary is empty")
        self._size = max(self._ids.values()) + 1
        if self._size > MAX_TOKENS:
            raise ValueError(f"it has token {self._size - 1:,}, and numbers must be below {MAX_TOKENS:,}")
        self._dtype = np.min_scalar_type(self._size - 1)
        is_bpe = type(self._tokenizer.model).__name__ == "BPE"  # a file need not say which kind it is
        try:
            self._table = self._make_table() if decodes_bytes(spec) else None
            self._encodes_bytes = is_bpe and encodes_bytes(spec)
            self.can_be_cut = can_be_cut(spec)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"this tokenizer.json is of an unknown form: {reason}") from None

    def _make_table(self) -> list[bytes]:
        """The bytes of each token, none for special ones and for numbers that no token has."""
        alphabet = byte_alphabet()
        table = [b""] * self._size
        for string, token in self._ids.items():
            is_added = token in self._is_special and self._tokenizer.model.token_to_id(string) is None
            own = string.encode() if is_added else bytes_of_token(string, alphabet)
            table[token] = b"" if self._is_special.get(token) else own
        return table

    @classmethod
    def train(cls, text: str) -> "JsonTokenizer":
        raise UserError(
            "a tokenizer.json is not made from the run's text: make one with "
            "`python -m mingpt prepare --tokenizer bpe`, or name one by data.tokenizer"
        )

    @classmethod
    def from_bytes(cls, content: bytes) -> "JsonTokenizer":
        return cls(content)

    def to_bytes(self) -> bytes:
        return self._content

    def to_tokenizer_json(self) -> bytes:
        return self._content

    def __len__(self) -> int:
        """The highest token + 1; a vocabulary may leave numbers out."""
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """(tokens,) of the whole text; needs little memory besides where `can_be_cut`."""
        tokens = bytearray()
        chunks = self.split_text(text)
        while batch := list(islice(chunks, CHUNKS_AT_ONCE)):
            for part in self.encode_batch(batch):
                tokens += part.tobytes()
        return np.frombuffer(tokens, dtype=self._dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text, on all cores. Raises UserError for text that is not valid Unicode."""
        for text in texts:
            check_unicode(text)  # some versions of the package raise TypeError, others encode other text
        encode = getattr(self._tokenizer, "encode_batch_fast", self._tokenizer.encode_batch)  # from 0.20.1
        encodings = encode(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def split_text(self, text: str, size: int = CHUNK_CHARACTERS) -> Iterator[str]:
        """Pieces of about `size` characters with, one after the other, the tokens of the whole.

        One piece, the text, unless `can_be_cut`.
        """
        if self.can_be_cut:
            yield from split_text(text, size)
        elif text:
            yield text

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of the tokens but for special ones; bytes that are no UTF-8 become U+FFFD."""
        return "".join(self.decode_pieces(tokens))

    def decode_pieces(self, tokens: Iterable[int]) -> Iterator[str]:
        """The text of tokens as they come: an incomplete character waits for its other bytes, or the end."""
        if self._table is None:
            return self._decode_windows(tokens)
        table = self._table
        return text_of_bytes(look_up(table, int(token)) for token in tokens)

    def _decode_windows(self, tokens: Iterable[int]) -> Iterator[str]:
        """What each token adds to the text of the tokens right before it.

        A decoder may treat the first token in a way of its own and turn bytes into U+FFFD until they are
        complete, so tokens are decoded behind those that gave text last.
        """
        before: list[int] = []
        pending: list[int] = []
        for token in tokens:
            pending.append(int(token))
            text = self._text_behind(before, pending)
            if text and not text.endswith("\ufffd"):
                yield text
                before, pending = pending, []
        yield self._text_behind(before, pending)

    def _text_behind(self, before: list[int], tokens: list[int]) -> str:
        head = self._tokenizer.decode(before, skip_special_tokens=True)
        text = self._tokenizer.decode(before + tokens, skip_special_tokens=True)
        if text.startswith(head):
            return text[len(head) :]
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray | None:
        """(vocabulary,) int64 for byte-level tokenizers that change nothing of the text, else None."""
        if self._table is None or not self._encodes_bytes:
            return None
        return np.array([len(piece) for piece in self._table], dtype=np.int64)

    @property
    def end_of_text(self) -> int | None:
        named = (self._ids[name] for name in END_OF_TEXT if name in self._ids)
        return next((token for token in named if self._is_special.get(token)), None)

    @property
    def is_byte_level(self) -> bool:
        """Whether the text of tokens is that of their bytes, one after the other."""
        return self._table is not None

    def tokens_by_name(self) -> dict[tuple[str, bool], int]:
        """{(a token's string, whether it is special): the token}"""
        return {(name, self._is_special.get(token, False)): token for name, token in self._ids.items()}

    def matching_tokens(self, other: Tokenizer) -> dict[int, int]:
        """By the tokens' strings, special to special; none where only one of the two is byte-level."""
        if not isinstance(other, JsonTokenizer) or self.is_byte_level != other.is_byte_level:
            return super().matching_tokens(other)
        theirs = other.tokens_by_name()
        return {token: theirs[name] for name, token in self.tokens_by_name().items() if name in theirs}


def load_with_package(content: bytes) -> "PackageTokenizer":
    """The package's tokenizer. Raises ValueError for other content, UserError if the package is missing."""
    try:
        from tokenizers import Tokenizer as PackageTokenizer
    except ImportError as error:
        raise UserError(
            f"a tokenizer.json needs the package tokenizers, which cannot be imported ({error}): "
            "pip install tokenizers"
        ) from None
    try:
        tokenizer = PackageTokenizer.from_str(content.decode())
    except Exception as error:  # which one depends on the package's version
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"this is no tokenizer.json: {reason}") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def check_unicode(text: str) -> None:
    """Raises UserError naming the first character that UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise UserError(
            f"the text has a lone surrogate (U+{code:04X}) at character {error.start:,}, which is not valid "
            "Unicode"
        ) from None


def parse_tokenizer_json(content: bytes) -> Tokenizer:
    """A CharTokenizer where one has written the file, which needs no package, else a JsonTokenizer."""
    return CharTokenizer.from_tokenizer_json(content) or JsonTokenizer(content)


TOKENIZERS["json"] = JsonTokenizer
