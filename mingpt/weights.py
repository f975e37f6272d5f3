"""Weights from files: those of a snapshot, of another run, or of GPT-2; checked before they are read."""

import logging
from typing import Any

import torch
from torch import Tensor

from mingpt.data import Tokenizer, load_tokenizer
from mingpt.errors import CorruptSnapshot, UnreadableSnapshot, UserError
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

log = logging.getLogger(__name__)


def check_model(manifest: dict[str, Any], entries: Entries) -> None:
    """Raises CorruptSnapshot unless a snapshot has exactly the tensors that its manifest's run has.

    These are the model's parameters and the optimizer's state, in float32. Nothing is allocated for them.
    """
    config = read_config(manifest)
    if config.model.n_layer > len(entries):
        raise CorruptSnapshot(f"its {len(entries)} tensors cannot have config.model.n_layer blocks")
    try:
        tokenizer = load_tokenizer("char", manifest["vocabulary"].encode())
    except ValueError as error:
        raise CorruptSnapshot(f"its vocabulary is damaged: {error}") from None
    parameters = parameter_shapes(config.model, vocab_size=len(tokenizer), block_size=config.data.block_size)
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
    surplus = sorted(entries.keys() - expected.keys())
    if surplus:
        raise CorruptSnapshot(f"its tensor file holds {surplus[0]!r}, which its model lacks")


def snapshot_tokenizer(snapshot: Snapshot) -> Tokenizer:
    """The tokenizer that a snapshot carries."""
    return load_tokenizer("char", snapshot.manifest["vocabulary"].encode())


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


def init_from(model: GPT, where: str, tokenizer: Tokenizer) -> None:
    """Start with the weights of another run, of one of its snapshots, or of a GPT-2 safetensors file.

    Embedding rows follow their tokens: a token that both tokenizers have takes over its row, a new one keeps
    its fresh row. Learned positions are cut to block_size. Raises UserError if anything else differs.
    """
    other: Tokenizer | None = None
    try:
        snapshot = open_snapshot(where, check_model)
        tensors, other = snapshot.tensors("model."), snapshot_tokenizer(snapshot)
    except UserError:
        if names_a_snapshot(where) or not where.endswith(".safetensors"):
            raise
        tensors = read_gpt2(where)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in ("wte.weight", "lm_head.weight"):
        if name in parameters and name in tensors and tensors[name].shape[1:] == parameters[name].shape[1:]:
            tensors[name] = match_rows(name, parameters[name], tensors[name], tokenizer, other, where)
    load_weights(model, tensors, f"snapshot.init_from={where}")
    log.info("weights taken from %s", where)


def match_rows(
    name: str, fresh: Tensor, theirs: Tensor, tokenizer: Tokenizer, other: Tokenizer | None, where: str
) -> Tensor:
    """(V, C) rows for this vocabulary from those of another one."""
    if other is None and theirs.shape == fresh.shape:
        return theirs
    if other is None:
        log.info("%s has another vocabulary: %s begins afresh", where, name)
        return fresh
    rows = fresh.clone()
    for token, their_token in tokenizer.matching_tokens(other).items():
        rows[token] = theirs[their_token]
    return rows


def read_gpt2(where: str) -> dict[str, Tensor]:
    """The tensors of a GPT-2 safetensors file, by path or URL, under our names. Raises UserError."""
    try:
        content = read_safetensors(where)
    except (CorruptSnapshot, UnreadableSnapshot) as error:
        raise UserError(f"snapshot.init_from={where} cannot be used: {error}") from None
    return from_gpt2(tensor_views(content))
