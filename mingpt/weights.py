"""Weights from files: those of a snapshot, of another run, or of GPT-2; checked before they are read."""

import hashlib
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.data import (
    Tokenizer,
    kind_of,
    load_named_tokenizer,
    load_tokenizer,
    parse_tokenizer_json,
)
from mingpt.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.hf_folder import HuggingFaceFolder, is_hf_folder, read_folder
from mingpt.model import GPT, from_gpt2, parameter_shapes
from mingpt.optim import state_shapes
from mingpt.snapshot import (
    Entries,
    Snapshot,
    names_a_snapshot,
    open_snapshot,
    read_config,
    read_safetensors,
    tensor_views,
)

TOKENIZER_TENSOR = "tokenizer"  # the bytes of a tokenizer.json
log = logging.getLogger(__name__)


def check_model(manifest: dict[str, Any], entries: Entries) -> None:
    """Raises CorruptSnapshot unless a snapshot has exactly the tensors that its manifest's run has.

    These are the model's parameters and the optimizer's state, in float32. Nothing is allocated for them.
    """
    config = read_config(manifest)
    if config.model.n_layer > len(entries):
        raise CorruptSnapshot(f"its {len(entries)} tensors cannot have config.model.n_layer blocks")
    vocab_size = check_tokenizer(manifest, entries)
    parameters = parameter_shapes(config.model, vocab_size=vocab_size, block_size=config.data.block_size)
    states = state_shapes(parameters, config.optimizer)
    expected = {f"model.{name}": shape for name, shape in parameters.items()}
    expected |= {f"optimizer.{name}": shape for name, shape in states.items()}
    for name, shape in expected.items():
        if name not in entries:
            raise CorruptSnapshot(f"its tensor file lacks {name}")
        if entries[name].shape != shape:
            raise CorruptSnapshot(
                f"its tensor {name} has shape {list(entries[name].shape)}, not {list(shape)}"
            )
        if entries[name].dtype != "F32":
            raise CorruptSnapshot(f"its tensor {name} has type {entries[name].dtype}, not F32")
    surplus = sorted(entries.keys() - expected.keys() - {TOKENIZER_TENSOR})
    if surplus:
        raise CorruptSnapshot(f"its tensor file holds {surplus[0]!r}, which its model lacks")


def check_tokenizer(manifest: dict[str, Any], entries: Entries) -> int:
    """Rows of the embedding. Raises CorruptSnapshot for a tokenizer that cannot be the run's."""
    fields = tokenizer_fields(manifest)
    entry = entries.get(TOKENIZER_TENSOR)
    if (entry is not None) != (fields["kind"] == "json"):
        raise CorruptSnapshot(
            f"its tensor {TOKENIZER_TENSOR} and its manifest's tokenizer contradict each other"
        )
    if entry is not None and (entry.dtype != "U8" or len(entry.shape) != 1):
        raise CorruptSnapshot(f"its tensor {TOKENIZER_TENSOR} is no list of bytes")
    if fields["kind"] in ("json", "none"):
        return int(fields["vocab_size"])
    try:
        size = len(load_tokenizer(fields["kind"], manifest["vocabulary"].encode()))
    except ValueError as error:
        raise CorruptSnapshot(f"its vocabulary is damaged: {error}") from None
    if size > fields.get("vocab_size", size):
        raise CorruptSnapshot(f"its vocabulary has {size} tokens, and its model {fields['vocab_size']}")
    return int(fields.get("vocab_size", size))


def tokenizer_fields(manifest: dict[str, Any]) -> dict[str, Any]:
    """What a manifest says of the tokenizer; at first there were characters alone, and it said nothing."""
    return manifest.get("tokenizer") or {"kind": "char"}


def snapshot_tokenizer(snapshot: Snapshot) -> Tokenizer | None:
    """The tokenizer that a snapshot carries, if it has one. Raises UserError if it cannot be used."""
    fields = tokenizer_fields(snapshot.manifest)
    if fields["kind"] == "none":
        return None
    content = snapshot.manifest["vocabulary"].encode()
    if fields["kind"] == "json":
        content = snapshot.tensors()[TOKENIZER_TENSOR].numpy().tobytes()
    try:
        tokenizer = load_tokenizer(fields["kind"], content)
    except ValueError as error:
        raise UserError(f"the tokenizer of the snapshot cannot be used: {error}") from None
    if len(tokenizer) > fields.get("vocab_size", len(tokenizer)):
        raise UserError(
            f"the tokenizer of the snapshot cannot be used: it has {len(tokenizer)} tokens, and the model "
            f"{fields['vocab_size']}"
        )
    return tokenizer


def snapshot_vocab_size(snapshot: Snapshot) -> int:
    """Rows of the model's embedding."""
    return int(tokenizer_fields(snapshot.manifest).get("vocab_size") or len(snapshot.manifest["vocabulary"]))


def manifest_tokenizer(
    tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of a manifest, and the tensors, that carry a tokenizer."""
    if tokenizer is None:
        return {"vocabulary": "", "tokenizer": {"kind": "none", "vocab_size": vocab_size}}, {}
    content = tokenizer.to_bytes()
    digest = hashlib.sha256(content).hexdigest()
    about = {"kind": kind_of(tokenizer), "vocab_size": vocab_size, "sha256": digest}
    if not tokenizer.stored_as_tensor:
        return {"vocabulary": content.decode(), "tokenizer": about}, {}
    tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {"vocabulary": "", "tokenizer": about}, {TOKENIZER_TENSOR: tensor}


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy every weight; learned positions are cut to block_size. Raises UserError for another model's."""
    parameters = dict(model.named_parameters())
    if "wpe.weight" in parameters and "wpe.weight" in tensors:
        tensors = tensors | {"wpe.weight": tensors["wpe.weight"][: model.block_size]}
    wrong = []
    for name, parameter in parameters.items():
        there: Any = tuple(tensors[name].shape) if name in tensors else "missing"
        if name in tensors and not tensors[name].is_floating_point():
            there = tensors[name].dtype
        if there != tuple(parameter.shape):
            wrong.append(f"{name}: {there} -> {tuple(parameter.shape)}")
    surplus = tensors.keys() - parameters.keys()
    if wrong or surplus:
        reasons = wrong[:3] + ([f"{len(surplus)} tensors that this model lacks"] if surplus else [])
        raise UserError(f"{origin} holds the weights of another model ({'; '.join(reasons)})")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])


@dataclass(frozen=True)
class OtherWeights:
    """Weights to start with, under this project's names, and the tokenizer that they were trained with."""

    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None
    where: str


def open_weights(where: str) -> OtherWeights:
    """Those of another run, of one of its snapshots, or of a model of Hugging Face's. Raises UserError."""
    if not where.endswith(".safetensors") and not names_a_snapshot(where) and is_hf_folder(where):
        folder = read_folder(where)
        return OtherWeights(folder.tensors, folder_tokenizer(folder), where)
    try:
        snapshot = open_snapshot(where, check_model)
        return OtherWeights(snapshot.tensors("model."), snapshot_tokenizer(snapshot), where)
    except UserError:
        if names_a_snapshot(where) or not where.endswith(".safetensors"):
            raise
        return OtherWeights(read_gpt2(where), None, where)


def folder_tokenizer(folder: HuggingFaceFolder) -> Tokenizer | None:
    """The tokenizer in a folder of Hugging Face's, if there is one. Raises UserError if it cannot be used."""
    if folder.tokenizer_json is None:
        try:
            return load_named_tokenizer(folder.folder, "snapshot.init_from")
        except UserError as error:
            log.warning("weights without a tokenizer: %s", error)
            return None
    try:
        return parse_tokenizer_json(folder.tokenizer_json)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"tokenizer.json in {folder.folder} cannot be used: {error}") from None


def init_from(model: GPT, other: OtherWeights, tokenizer: Tokenizer | None) -> None:
    """Start with other weights, for the model that `tokenizer` goes with.

    Embedding rows follow their tokens: a token that both tokenizers have takes over its row, a new one keeps
    its fresh row. Learned positions are cut to block_size. Raises UserError if anything else differs.
    """
    tensors = dict(other.tensors)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in ("wte.weight", "lm_head.weight"):
        if name in parameters and name in tensors and tensors[name].shape[1:] == parameters[name].shape[1:]:
            tensors[name] = match_rows(name, parameters[name], tensors[name], tokenizer, other)
    load_weights(model, tensors, f"snapshot.init_from={other.where}")
    log.info("weights taken from %s", other.where)


def match_rows(
    name: str, fresh: Tensor, theirs: Tensor, tokenizer: Tokenizer | None, other: OtherWeights
) -> Tensor:
    """(V, C) rows for this vocabulary from those of another one."""
    if tokenizer is None or other.tokenizer is None:
        if theirs.shape == fresh.shape:
            return theirs
        log.info("%s has another vocabulary: %s begins afresh", other.where, name)
        return fresh
    matching = tokenizer.matching_tokens(other.tokenizer)
    rows = fresh.clone()
    rows[list(matching.keys())] = theirs[list(matching.values())].to(rows.dtype)
    return rows


def read_gpt2(where: str) -> dict[str, Tensor]:
    """The tensors of a GPT-2 safetensors file, by path or URL, under our names. Raises UserError."""
    try:
        content = read_safetensors(where)
    except (CorruptSnapshot, UnreadableSnapshot) as error:
        raise UserError(f"snapshot.init_from={where} cannot be used: {error}") from None
    return from_gpt2(tensor_views(content))
