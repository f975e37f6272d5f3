"""Turn text or token shards (.bin files of tokens) into windows, and assign the windows to workers.

Each window of an epoch is trained on exactly once, whatever the number of workers. Uses no model and no
process group.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mingpt.data.json_tokenizer import JsonTokenizer, parse_tokenizer_json
from mingpt.data.shards import ShardData, is_shards, local_path, open_shards
from mingpt.data.source import load_named_tokenizer, read_bytes, read_named_tokenizer
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer, kind_of, load_tokenizer

if TYPE_CHECKING:
    from mingpt.data.windows import (
        CharDataset,
        Corpus,
        Data,
        ElasticSampler,
        TextData,
        make_corpus,
        mix,
        to_device,
        tokenize,
        train_tokenizer,
    )


def __getattr__(name: str) -> Any:
    # Imported on first use: windows.py imports torch, which would cost `prepare` a second and, with CUDA,
    # half a gigabyte.
    if name in __all__:
        return getattr(importlib.import_module("mingpt.data.windows"), name)
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
    "to_device",
    "tokenize",
    "train_tokenizer",
]
