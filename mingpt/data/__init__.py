"""Text or token shards to windows, and which worker reads which window at which step.

Each window of an epoch is read exactly once, whatever the number of workers. Knows no model and no process
group.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mingpt.data.char_tokenizer import CharTokenizer
from mingpt.data.gpt2_vocabulary import load_named_tokenizer, read_named_tokenizer
from mingpt.data.json_tokenizer import JsonTokenizer, parse_tokenizer_json
from mingpt.data.shards import ShardData, is_shards, local_path, open_shards
from mingpt.data.source import read_bytes
from mingpt.data.tokenizer import TOKENIZERS, Tokenizer, kind_of, load_tokenizer

if TYPE_CHECKING:
    from mingpt.data.sampler import ElasticSampler, mix
    from mingpt.data.tokens import Corpus, Data, TextData, make_corpus, tokenize, train_tokenizer
    from mingpt.data.windows import CharDataset

# These modules import torch, which takes mingpt.prepare a second and, with CUDA, half a gigabyte.
LAZY = {
    "sampler": ("ElasticSampler", "mix"),
    "tokens": ("Corpus", "Data", "TextData", "make_corpus", "tokenize", "train_tokenizer"),
    "windows": ("CharDataset",),
}


def __getattr__(name: str) -> Any:
    for module, names in LAZY.items():
        if name in names:
            return getattr(importlib.import_module(f"mingpt.data.{module}"), name)
    raise AttributeError(f"module 'mingpt.data' has no attribute {name!r}")


__all__ = [
    "TOKENIZERS",
    "CharDataset",
    "CharTokenizer",
    "Corpus",
    "Data",
    "ElasticSampler",
    "JsonTokenizer",
    "ShardData",
    "TextData",
    "Tokenizer",
    "is_shards",
    "kind_of",
    "load_named_tokenizer",
    "load_tokenizer",
    "local_path",
    "make_corpus",
    "mix",
    "open_shards",
    "parse_tokenizer_json",
    "read_bytes",
    "read_named_tokenizer",
    "tokenize",
    "train_tokenizer",
]
