"""Any Hugging Face tokenizer.json, run by the `tokenizers` package, which is imported when one is made."""

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mingpt.data import byte_level
from mingpt.data.char_tokenizer import CharTokenizer
from mingpt.data.tokenizer import TOKENIZERS, Tokenizer
from mingpt.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as PackageTokenizer

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|eot|>", "</s>", "<eos>")
CHUNK_CHARACTERS = 1 << 16
CHUNKS_AT_ONCE = 16  # the package needs about 100 bytes for a token while it encodes
MAX_TOKENS = 1 << 24  # memory is taken for each number up to the highest


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
            self._table = self._make_table() if byte_level.decodes_bytes(spec) else None
            self._encodes_bytes = is_bpe and byte_level.encodes_bytes(spec)
            self.can_be_cut = byte_level.can_be_cut(spec)
        except (KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"this tokenizer.json is of an unknown form: {reason}") from None

    def _make_table(self) -> list[bytes]:
        """The bytes of each token, none for special ones and for numbers that no token has."""
        alphabet = byte_level.byte_alphabet()
        table = [b""] * self._size
        for string, token in self._ids.items():
            is_added = token in self._is_special and self._tokenizer.model.token_to_id(string) is None
            own = string.encode() if is_added else byte_level.bytes_of_token(string, alphabet)
            table[token] = b"" if self._is_special.get(token) else own
        return table

    @classmethod
    def train(cls, text: str) -> "JsonTokenizer":
        raise UserError(
            "a tokenizer.json is not made from the run's text: make one with "
            "`python -m mingpt.prepare --tokenizer bpe`, or name one by data.tokenizer"
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
            yield from byte_level.split_text(text, size)
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
        return byte_level.text_of_bytes(byte_level.look_up(table, int(token)) for token in tokens)

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
