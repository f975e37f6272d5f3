"""Turn text or token shards (.bin files of tokens) into windows, and assign the windows to workers.

A window is an input sequence and its targets. The windows of an epoch, and their order, do not depend on the
number of workers. This package uses no model and no process group.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mingpt.data.json_tokenizer import (
    JsonTokenizer,
    load_named_tokenizer,
    parse_tokenizer_json,
    read_named_tokenizer,
)
from mingpt.data.shards import ShardData, open_shards
from mingpt.data.source import read_bytes
from mingpt.data.tokenizers import TOKENIZERS, CharTokenizer, Tokenizer, kind_of, load_tokenizer

if TYPE_CHECKING:
    from mingpt.data.corpus import Corpus, Data, TextData, make_corpus, tokenize
    from mingpt.data.windows import CharDataset, ElasticSampler, mix, to_device


def __getattr__(name: str) -> Any:
    # Imported on first use: these modules import torch, which would cost `prepare` a second and, with CUDA,
    # half a gigabyte.
    if name not in __all__:
        raise AttributeError(f"module 'mingpt.data' has no attribute {name!r}")
    windows = importlib.import_module("mingpt.data.windows")
    return getattr(windows if hasattr(windows, name) else importlib.import_module("mingpt.data.corpus"), name)


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
    "kind_of",
    "load_named_tokenizer",
    "load_tokenizer",
    "make_corpus",
    "mix",
    "open_shards",
    "parse_tokenizer_json",
    "read_bytes",
    "read_named_tokenizer",
    "to_device",
    "tokenize",
]
