"""Weights to start a run with: those of another run, or of a model in Hugging Face's format.

A folder in Hugging Face's format is read at any path or fsspec URL: config, safetensors, tokenizer. Models
are read that are this project's own `gpt2` or `modern` (model/hf.py), in one file or in shards that an index
lists. Every name, shape and size is checked first; no pickle is loaded, and transformers is not needed.
"""

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import RETRIES_S
from mingpt.base.urls import open_url
from mingpt.config import ModelConfig
from mingpt.data import Tokenizer, load_named_tokenizer, parse_tokenizer_json
from mingpt.model import HFModel, from_gpt2, from_hf, hf_model_of, hf_shapes
from mingpt.model.hf import is_redundant
from mingpt.snapshot import names_a_snapshot, open_snapshot, read_safetensors
from mingpt.snapshot.manifest import parse_object
from mingpt.snapshot.reading import (
    SourceFile,
    TensorFile,
    check_finite,
    read_range,
    size_and_version,
    with_retries,
)
from mingpt.training.state import check_model, fit_weights, snapshot_tokenizer

T = TypeVar("T")
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
GPT2_URL = "https://huggingface.co/openai-community/{}/resolve/main"
CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
INDEX = f"{WEIGHTS}.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}\.safetensors")
MAX_JSON = 4 << 20  # bytes of config.json or of an index; gpt2-xl's would take 60,000
MAX_TOKENIZER = 64 << 20  # bytes; large vocabularies take 20 million
TYPES = (torch.float32, torch.float16, torch.bfloat16)
ABSENT = (401, 403, 404, 410)  # what servers answer where there is no file, or none for us
EMBEDDINGS = ("wte.weight", "lm_head.weight")
VOCABULARIES = ("vocab.json", "encoder.json")  # of GPT-2, in place of a tokenizer.json
SHAPE_SETTINGS = ("arch", "n_layer", "n_head", "n_embd")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A model from elsewhere. Its tokenizer is `tokenizer_json`, or whatever else lies in `folder`."""

    folder: str  # path or URL; for the words gpt2, gpt2-medium, ... that of the model they stand for
    config: dict[str, Any]  # of config.json
    model: HFModel
    tensors: dict[str, Tensor]  # float32, under the names of GPT's parameters
    tokenizer_json: bytes | None  # the content of tokenizer.json; GPT-2 may have vocab.json and merges.txt


class Folder:
    """The files of a folder. Methods raise UserError, which names the file, if reading fails."""

    def __init__(self, where: str, retries_s: tuple[float, ...] = RETRIES_S) -> None:
        self.url, self.retries_s = folder_url(where), retries_s
        self.files, root = open_url(self.url, where)
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def attempt(self, name: str, work: Callable[[], T]) -> T:
        """The result of `work`, which reads this file, with retries."""
        try:
            return with_retries(work, name, self.retries_s)
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            raise UserError(f"the model in {self.url} cannot be used: {error}") from None

    def exists(self, name: str) -> bool:
        return self.attempt(name, lambda: is_there(self.files, self.path(name)))

    def read(self, name: str, limit: int) -> bytes:
        """The whole file, of at most `limit` bytes."""
        content = self.attempt(name, lambda: read_up_to(self.files, self.path(name), limit + 1))
        if len(content) > limit:
            raise self.refuse(f"{name} has more than {limit:,} bytes")
        return content

    def read_json(self, name: str) -> dict[str, Any]:
        content = self.read(name, MAX_JSON)
        return self.attempt(name, lambda: parse_object(content, name))

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        file = SourceFile(self.files, self.path(name), "the file", self.retries_s)
        try:
            tensors = TensorFile(file).tensors()
            for tensor_name, tensor in tensors.items():
                check_finite(tensor_name, tensor)
            return tensors
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            raise self.refuse(f"{name}: {error}") from None

    def refuse(self, reason: str) -> UserError:
        return UserError(f"the model in {self.url} cannot be used: {reason}")


def folder_url(where: str) -> str:
    """A path or URL; gpt2, gpt2-medium, gpt2-large and gpt2-xl are on the hub where no such path exists."""
    return GPT2_URL.format(where) if where in GPT2_NAMES and not os.path.exists(where) else where


def is_hf_folder(where: str) -> bool:
    """Whether there is a config.json, as in no run or snapshot folder. Raises UserError if reading fails."""
    return Folder(where).exists(CONFIG)


def read_folder(where: str) -> HuggingFaceFolder:
    """The model at a path or URL, or that of one of the words gpt2, gpt2-medium, gpt2-large and gpt2-xl.

    Raises UserError if it cannot be read, is not what it should be, or is a model of another kind.
    """
    folder = Folder(where)
    if not folder.exists(CONFIG):
        raise folder.refuse(f"there is no {CONFIG}; give a folder in the format of Hugging Face")
    config = folder.read_json(CONFIG)
    try:
        model = hf_model_of(config)
    except UserError as error:
        raise folder.refuse(str(error)) from None
    weights = read_weights(folder)
    theirs = {name: weights[name] for name in weights if not is_redundant(name, model.config.arch)}
    check_shapes(folder, theirs, model)
    tensors = {name: tensor.float() for name, tensor in from_hf(theirs, model.config).items()}
    tokenizer = folder.read(TOKENIZER, MAX_TOKENIZER) if folder.exists(TOKENIZER) else None
    return HuggingFaceFolder(folder.url, config, model, tensors, tokenizer)


def read_weights(folder: Folder) -> dict[str, Tensor]:
    """All tensors under the names that the files give them."""
    if folder.exists(WEIGHTS):
        return folder.read_tensors(WEIGHTS)
    if not folder.exists(INDEX):
        if any(folder.exists(name) for name in PICKLES):
            raise folder.refuse(
                f"it has {PICKLES[0]} alone, a pickle, which can run any code when it is loaded: save the "
                f"model as {WEIGHTS}, as transformers' save_pretrained does"
            )
        raise folder.refuse(f"there is neither {WEIGHTS} nor {INDEX}")
    found: dict[str, Tensor] = {}
    for shard, names in read_index(folder).items():
        tensors = folder.read_tensors(shard)
        if tensors.keys() != names:
            name = min(tensors.keys() ^ names)
            reason = "holds {!r}, which is not listed for it in" if name in tensors else "lacks {!r} of"
            raise folder.refuse(f"{shard} {reason.format(name)} {INDEX}")
        found |= tensors
    return found


def read_index(folder: Folder) -> dict[str, set[str]]:
    """{file: the names of its tensors}."""
    listed = folder.read_json(INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise folder.refuse(f"{INDEX} has no weight_map that lists tensors")
    shards: dict[str, set[str]] = {}
    for name, shard in listed.items():
        if not isinstance(shard, str) or not SHARD.fullmatch(shard) or ".." in shard:
            shown = repr(shard)[:100]
            raise folder.refuse(f"{INDEX} lists {shown}, which is not the name of a safetensors file there")
        shards.setdefault(shard, set()).add(name)
    return shards


def check_shapes(folder: Folder, tensors: dict[str, Tensor], model: HFModel) -> None:
    """Raises UserError unless there is exactly what config.json says, with or without the common prefix."""
    if model.config.n_layer > len(tensors):
        raise folder.refuse(
            f"{CONFIG} speaks of {model.config.n_layer:,} blocks and there are {len(tensors)} tensors"
        )
    expected = hf_shapes(model)
    prefix = "" if tensors.keys() & expected.keys() - {"lm_head.weight"} else common_prefix(expected)
    there = {name if name == "lm_head.weight" else prefix + name: one for name, one in tensors.items()}
    for name, shape in expected.items():
        if name not in there:
            raise folder.refuse(f"the tensor {name} is missing")
        if tuple(there[name].shape) != shape:
            raise folder.refuse(
                f"the tensor {name} has shape {list(there[name].shape)}, and {CONFIG} asks for {list(shape)}"
            )
        if there[name].dtype not in TYPES:
            raise folder.refuse(
                f"the tensor {name} is {there[name].dtype}, and only float32, float16 and bfloat16 are read"
            )
    surplus = there.keys() - expected.keys()
    if surplus:
        raise folder.refuse(f"it holds {min(surplus)[:100]!r}, which such a model lacks")


def common_prefix(names: Iterable[str]) -> str:
    """ "transformer." or "model." """
    return next(name for name in names if name != "lm_head.weight").partition(".")[0] + "."


def is_there(files: Any, path: str) -> bool:
    """Raises whatever the driver raises unless it knows that there is no such file."""
    try:
        files.info(path)
    except NotADirectoryError:
        return False
    except FileNotFoundError as error:
        cause = error.__cause__
        if "http" not in files.protocol or cause is None or getattr(cause, "status", 0) in ABSENT:
            return False
        raise OSError(f"{type(cause).__name__}: {cause}") from None  # fsspec calls any failure "not found"
    return True


def read_up_to(files: Any, path: str, limit: int) -> bytes:
    """The first bytes of a file, `limit` of them at most. Raises whatever the driver raises."""
    if isinstance(files, LocalFileSystem):
        content = bytearray(min(limit, size_and_version(files, path)[0]))
        read_range(files, path, 0, memoryview(content))
        return bytes(content)
    with files.open(path, "rb") as file:
        return bytes(file.read(limit))


@dataclass(frozen=True)
class InitialWeights:
    """Tensors under this project's names, and the tokenizer and the model that they were trained with."""

    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None
    model: ModelConfig | None  # None: not known
    where: str

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return len(self.tensors["wte.weight"])


def open_weights(where: str) -> InitialWeights:
    """Those at a path or URL, or of gpt2, gpt2-medium, gpt2-large or gpt2-xl. Raises UserError."""
    if not where.endswith(".safetensors") and not names_a_snapshot(where) and is_hf_folder(where):
        folder = read_folder(where)
        return InitialWeights(folder.tensors, folder_tokenizer(folder), folder.model.config, where)
    try:
        snapshot = open_snapshot(where, check_model, weights_only=True)
    except UserError:
        if names_a_snapshot(where) or not where.endswith(".safetensors"):
            raise
        return InitialWeights(read_gpt2(where), None, None, where)
    tensors, tokenizer = snapshot.tensors("model."), snapshot_tokenizer(snapshot)
    return InitialWeights(tensors, tokenizer, snapshot.config.model, where)


def folder_tokenizer(folder: HuggingFaceFolder) -> Tokenizer | None:
    """The tokenizer in a folder of Hugging Face's, if there is one. Raises UserError if it cannot be used."""
    if folder.tokenizer_json is None:
        files = Folder(folder.folder)
        if not any(files.exists(name) for name in VOCABULARIES):
            log.info("%s has no tokenizer", folder.folder)
            return None
        return load_named_tokenizer(folder.folder, "snapshot.init_from")
    try:
        return parse_tokenizer_json(folder.tokenizer_json)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"tokenizer.json in {folder.folder} cannot be used: {error}") from None


def match_weights(
    initial: InitialWeights,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    draw: Callable[[str, tuple[int, ...]], Tensor],
    tokenizer: Tokenizer | None,
) -> dict[str, Tensor]:
    """The weights to start a model of these shapes with; `tokenizer` is that of the run to come.

    Embedding rows follow their tokens: a token that both tokenizers have takes over its row, a new one keeps
    the row that `draw` gives. Learned positions are cut to block_size. Raises UserError if anything else
    differs.
    """
    origin = f"snapshot.init_from={initial.where}"
    if initial.model is not None:
        there, here = vars(initial.model), vars(config)
        wrong = [f"model.{name}={there[name]}" for name in SHAPE_SETTINGS if there[name] != here[name]]
        if wrong:
            raise UserError(f"{origin} holds the weights of another model: set {' '.join(wrong)}")
    tensors = dict(initial.tensors)
    for name in EMBEDDINGS:
        if name in shapes and name in tensors and tuple(tensors[name].shape[1:]) == shapes[name][1:]:
            random = draw(name, shapes[name])
            tensors[name] = match_rows(name, random, tensors[name], tokenizer, initial.tokenizer)
    tensors = fit_weights(tensors, shapes, origin)
    log.info("weights taken from %s", initial.where)
    return tensors


def match_rows(
    name: str, here: Tensor, there: Tensor, tokenizer: Tokenizer | None, other: Tokenizer | None
) -> Tensor:
    """(V, C) rows of an embedding for `tokenizer`, from `there`, which is for `other`."""
    matching: dict[int, int] = {}
    if tokenizer is None or other is None:
        same = there.shape == here.shape
    else:
        same = there.shape == here.shape and tokenizer.fingerprint() == other.fingerprint()
        matching = tokenizer.matching_tokens(other)
    if same:
        return there
    rows = here.clone()
    pairs = [(token, theirs) for token, theirs in matching.items() if theirs < len(there)]
    if pairs:
        tokens, theirs = zip(*pairs, strict=True)
        rows[list(tokens)] = there[list(theirs)].to(rows.dtype)
    log.info("%s: %d of %d rows taken over, the others are random", name, len(pairs), len(rows))
    return rows


def read_gpt2(where: str) -> dict[str, Tensor]:
    """The tensors of a GPT-2 safetensors file, by path or URL, under our names. Raises UserError."""
    try:
        tensors = read_safetensors(where)
    except (CorruptSnapshot, UnreadableSnapshot) as error:
        raise UserError(f"snapshot.init_from={where} cannot be used: {error}") from None
    return from_gpt2(tensors)
