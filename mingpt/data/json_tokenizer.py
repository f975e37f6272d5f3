"""Find and run a Hugging Face tokenizer.json with the package `tokenizers`, which is imported on first use.

`can_be_cut` says whether a text can be split into pieces without changing the text's tokens.
"""

import contextlib
import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mingpt.base.errors import UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.rows import in_batches
from mingpt.data.source import AbsentFile, download, relative_to
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as PackageTokenizer

# Places at which a text can be split: GPT-2's pattern ends a word before whitespace that follows a character
# other than whitespace. A text cannot be split after whitespace, because the pattern looks ahead. Nor can it
# be split for a pattern that joins punctuation and line breaks, such as cl100k's.
CUT = re.compile(r"(?<=\S)\n")
CUT_IN_A_LINE = re.compile(r"(?<=\S)[\n ]")
# The names of end-of-text tokens, for example those of GPT-2, Llama, DeepSeek, Anthropic and Cohere.
END_OF_TEXT = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eot|>",
    "</s>",
    "<eos>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<EOT>",
    "<|eos|>",
    "[EOS]",
    "<EOS_TOKEN>",
)
MAX_TOKENS = 1 << 24  # arrays have an element for each token up to the highest
PIECE_CHARACTERS = 1 << 16
BATCH_CHARACTERS = 1 << 20  # encoded at once; while it encodes, the package needs about 100 bytes per token
GPT2 = ("openai-community/gpt2", "tokenizer.json")
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"  # so that all runs get the same file


def can_be_cut(spec: dict[str, Any]) -> bool:
    """Return true only if the tokens of the pieces of `split_text` are those of the whole text, for any text.

    `spec` is a parsed tokenizer.json that the package `tokenizers` takes.
    """
    splitter = spec.get("pre_tokenizer") or {}
    return (
        not spec.get("normalizer")
        and splitter.get("type") == "ByteLevel"
        and not splitter.get("add_prefix_space", True)
        and splitter.get("use_regex", True)
        and not any(
            token.get("rstrip") or token.get("single_word") or CUT_IN_A_LINE.search(token["content"])
            for token in spec.get("added_tokens", [])
        )
    )


def split_text(text: str, size: int) -> Iterator[str]:
    """Split `text`, and yield the pieces in order.

    All pieces but the last have at least `size` characters. After `size` characters, a piece ends before the
    first line break among the next `size` characters. If there is none, the piece ends before the next line
    break or space, or at the end of the text. A line break or space that follows whitespace does not count.
    """
    start = 0
    while start < len(text):
        cut = CUT.search(text, start + size, start + 2 * size) or CUT_IN_A_LINE.search(text, start + size)
        end = cut.start() if cut else len(text)
        yield text[start:end]
        start = end


class JsonTokenizer(Tokenizer):
    """The tokenizer that a tokenizer.json describes.

    Encoding adds no special tokens, and treats special tokens in a text as plain text. The file's settings
    for truncation, padding and dropout are ignored.
    """

    def __init__(self, content: bytes) -> None:
        """Parse the content of a tokenizer.json.

        Raises ValueError if the content cannot be used, UserError if `tokenizers` cannot be imported.
        """
        self._content = content
        self._tokenizer = load_with_package(content)
        self._is_special = {
            token: added.special for token, added in self._tokenizer.get_added_tokens_decoder().items()
        }
        self._ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self._size = max(self._ids.values()) + 1  # a ValueError if the vocabulary is empty
        if self._size > MAX_TOKENS:
            raise ValueError(f"it has token {self._size - 1:,}, and numbers must be below {MAX_TOKENS:,}")
        self._dtype = np.min_scalar_type(self._size - 1)
        try:
            self._can_be_cut = can_be_cut(json.loads(content))
        except (KeyError, TypeError, AttributeError) as error:  # the package fills in what a file leaves out
            raise ValueError(f"this tokenizer.json is of an unknown form: {reason_of(error)}") from None

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

    to_tokenizer_json = to_bytes

    def __len__(self) -> int:
        """Return the highest token + 1. Some smaller numbers may not be tokens."""
        return self._size

    def encode(self, text: str) -> np.ndarray:
        """Return a text's tokens, (tokens,), in the smallest unsigned dtype for this vocabulary.

        Raises UserError for a lone surrogate, or if a part of the text has no token, not even an unknown
        token. But a BPE model without an unknown token leaves such a part out.
        """
        arrays = [np.empty(0, dtype=self._dtype)]
        for batch in in_batches(self.split(text), len, BATCH_CHARACTERS):
            arrays += self.encode_batch(batch)
        return np.concatenate(arrays)

    def split(self, text: str) -> Iterable[str]:
        return split_text(text, PIECE_CHARACTERS) if self._can_be_cut else [text]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the tokens of each text, an array per text. Raises the errors of `encode`."""
        try:
            for text in texts:  # some versions of the package raise TypeError, others encode other text
                text.encode()
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the package has no other type for a character without a token
            raise UserError(f"the text cannot be encoded: {reason_of(error)}") from None
        return [np.array(encoding.ids, dtype=self._dtype) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(map(int, tokens)), skip_special_tokens=True)
        return text

    @property
    def end_of_text(self) -> int | None:
        named = (self._ids[name] for name in END_OF_TEXT if name in self._ids)
        return next((token for token in named if self._is_special.get(token)), None)


def import_tokenizers(what: str) -> Any:
    """Return the package `tokenizers`.

    Raises UserError if the import fails; the message begins with `what`, the thing that needs the package.
    """
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(
            f"{what} needs the package tokenizers, which cannot be imported ({error}): pip install tokenizers"
        ) from None


def byte_level_bpe(model: Any) -> Any:
    """Return a `tokenizers.Tokenizer` that splits text as GPT-2 does, and encodes it with the BPE `model`."""
    library = import_tokenizers("a BPE")
    package = library.Tokenizer(model)
    package.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    package.decoder = library.decoders.ByteLevel()
    return package


def load_with_package(content: bytes) -> "PackageTokenizer":
    """Return a `tokenizers.Tokenizer` for `content`, a tokenizer.json.

    Truncation, padding and dropout are off, and special tokens in a text are plain text. Raises ValueError
    for other content, UserError if the package `tokenizers` cannot be imported.
    """
    library = import_tokenizers("a tokenizer.json")
    try:
        tokenizer = library.Tokenizer.from_str(content.decode())
    except Exception as error:  # its type depends on the package's version
        raise ValueError(f"this is not a tokenizer.json: {reason_of(error)}") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


def parse_tokenizer_json(content: bytes) -> Tokenizer:
    """Return the tokenizer in a tokenizer.json.

    The result is a CharTokenizer if that class wrote the file, else a JsonTokenizer. Raises ValueError for
    content that cannot be used. Raises UserError if a JsonTokenizer is needed and the package `tokenizers`
    cannot be imported.
    """
    with contextlib.suppress(ValueError):
        return CharTokenizer.from_bytes(content)
    return JsonTokenizer(content)


def load_named_tokenizer(name: str, setting: str = "data.tokenizer") -> Tokenizer:
    """Return the tokenizer `name`: gpt2, or the path or URL of a tokenizer.json or of a folder with one.

    Raises UserError if it cannot be read or used; `setting`, the setting's name, is for the message.
    """
    return parse_named_tokenizer(read_named_tokenizer(name, setting), name, setting)


def parse_named_tokenizer(content: bytes, name: str, setting: str) -> Tokenizer:
    """Return the tokenizer in `content`, a tokenizer.json.

    Raises UserError if the content cannot be used; the message begins with `setting`, the setting's name, and
    `name`, its value. Also raises UserError if `tokenizers` is needed and cannot be imported.
    """
    try:
        return parse_tokenizer_json(content)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{setting} {name} cannot be used: {error}") from None


def read_named_tokenizer(name: str, setting: str = "data.tokenizer") -> bytes:
    """Return a tokenizer.json's content. `name` is gpt2, or the path or URL of the .json file or its folder.

    Raises UserError if the file cannot be read; the message begins with `setting`, the setting's name.
    """
    if name == "gpt2":
        return download_gpt2(setting)
    is_file = name.partition("?")[0].endswith(".json")
    try:
        return download(name if is_file else f"{name.rstrip('/')}/tokenizer.json", setting)
    except AbsentFile:
        raise UserError(
            f"{setting} {name} is neither gpt2, nor a .json file that exists, nor a folder with "
            f"tokenizer.json{relative_to(name)}; `python -m mingpt prepare --tokenizer bpe` makes a BPE of a "
            "text"
        ) from None


def download_gpt2(setting: str) -> bytes:
    """Return GPT-2's tokenizer.json, from the Hugging Face hub or the hub's local cache.

    Raises UserError if the file cannot be read; the message begins with `setting`.
    """
    try:
        from huggingface_hub import hf_hub_download  # `tokenizers` depends on it

        return Path(hf_hub_download(*GPT2, revision=GPT2_REVISION)).read_bytes()
    except DriverError as error:
        raise UserError(
            f"{setting}=gpt2 cannot be read from Hugging Face's hub: {reason_of(error)}; without a network, "
            "give the path of its tokenizer.json"
        ) from None


TOKENIZERS["json"] = JsonTokenizer
