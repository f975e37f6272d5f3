"""Tokenizers by name: a tokenizer.json, GPT-2's two files in a folder, or GPT-2's own, downloaded."""

import json
import os

from mingpt.data.json_tokenizer import END_OF_TEXT, JsonTokenizer
from mingpt.data.source import AbsentFile, download, read_cached, relative_to
from mingpt.errors import UserError

# The checksums are those that tiktoken pins.
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_VOCAB = ("encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")
GPT2_MERGES = ("vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5")
PAIRS = (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe"))


def load_named_tokenizer(name: str, setting: str = "data.tokenizer") -> JsonTokenizer:
    """The tokenizer that `read_named_tokenizer` finds. Raises UserError for a file that is none."""
    return parse_named_tokenizer(read_named_tokenizer(name, setting), name, setting)


def parse_named_tokenizer(content: bytes, name: str, setting: str) -> JsonTokenizer:
    """That of the content. Raises UserError, beginning with `setting`, for content that cannot be used."""
    try:
        return JsonTokenizer(content)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{setting} {name} cannot be used: {error}") from None


def read_named_tokenizer(name: str, setting: str = "data.tokenizer") -> bytes:
    """The content of a tokenizer.json, by the word gpt2, or a path or fsspec URL of the file or its folder.

    A folder may hold GPT-2's vocab.json and merges.txt, or encoder.json and vocab.bpe, instead. Raises
    UserError, which begins with `setting`, for what cannot be read.
    """
    if name == "gpt2":
        try:
            vocab, merges = (
                read_cached(f"{GPT2_URL}/{file}", sha256, f"{setting}=gpt2:", "its fixed checksum")
                for file, sha256 in (GPT2_VOCAB, GPT2_MERGES)
            )
        except UserError as error:
            raise UserError(
                f"{error}; or name a folder with encoder.json and vocab.bpe, or a tokenizer.json, by path"
            ) from None
        return join_vocabulary(vocab, merges, f"{setting}=gpt2")
    if name.partition("?")[0].endswith(".json"):
        return download(name, setting)
    return read_folder(name.rstrip("/"), setting)


def read_folder(folder: str, setting: str) -> bytes:
    """The content of the tokenizer.json in a folder, or of one made from the two files of GPT-2's form."""
    try:
        return download(f"{folder}/tokenizer.json", setting)
    except AbsentFile:
        pass
    for vocab_name, merges_name in PAIRS:
        try:
            vocab = download(f"{folder}/{vocab_name}", setting)
        except AbsentFile:
            continue
        merges = download(f"{folder}/{merges_name}", setting)
        return join_vocabulary(vocab, merges, f"{setting} {folder}")
    hint = relative_to(folder)
    if "/" not in folder and not os.path.lexists(folder):
        hint += "; `python -m mingpt.prepare --tokenizer bpe` makes a BPE of a text"
    raise UserError(
        f"{setting} {folder} is neither gpt2, nor a .json file, nor a folder with tokenizer.json, or "
        f"vocab.json and merges.txt, or encoder.json and vocab.bpe{hint}"
    )


def join_vocabulary(vocab: bytes, merges: bytes, source: str) -> bytes:
    """The tokenizer.json of GPT-2's two files. Raises UserError, beginning with `source`, for other files."""
    try:
        tokens = json.loads(vocab)
        ids = sorted(tokens.items(), key=lambda item: item[1])
        lines = merges.decode().split("\n")
    except (ValueError, AttributeError, TypeError) as error:
        raise UserError(f"{source} has no vocabulary of GPT-2's form: {error}") from None
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    spec = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": token, "content": name, **flags} for name, token in ids if name in END_OF_TEXT
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": dict(ids),
            "merges": [line for line in lines if line and not line.startswith("#version")],
        },
    }
    return json.dumps(spec, ensure_ascii=False, indent=1).encode()
