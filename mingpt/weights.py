"""What a snapshot holds: the tensors of its run, and its tokenizer; checked before they are read."""

import hashlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mingpt.data import (
    Tokenizer,
    kind_of,
    load_tokenizer,
)
from mingpt.errors import CorruptSnapshot, UserError
from mingpt.model import GPT, parameter_shapes
from mingpt.optim import state_shapes
from mingpt.parallel import split_rows
from mingpt.snapshot import (
    Entries,
    Snapshot,
    read_config,
)

TOKENIZER_TENSOR = "tokenizer"  # the bytes of a tokenizer.json
log = logging.getLogger(__name__)


def check_model(manifest: dict[str, Any], entries: Entries) -> None:
    """Raises CorruptSnapshot unless a snapshot has exactly the tensors that its manifest's run has.

    These are the model's parameters and the optimizer's state, in float32. Nothing is allocated for them.
    """
    if manifest.get("shard"):
        raise CorruptSnapshot("it is a part of a sharded state")
    check_shard(manifest, entries)


def check_shard(manifest: dict[str, Any], entries: Entries) -> None:
    """`check_model` for what may be a part of a sharded state: the rows of one rank of what is sharded.

    The tensors that are not sharded are there, all of them, or none is.
    """
    config = read_config(manifest)
    if config.model.n_layer > len(entries):
        raise CorruptSnapshot(f"its {len(entries)} tensors cannot have config.model.n_layer blocks")
    vocab_size = check_tokenizer(manifest, entries)
    shapes = snapshot_shapes(manifest, vocab_size)
    sharded = {name: shape for name, shape in shapes.items() if is_sharded(manifest, name, shape)}
    whole = {name: shape for name, shape in shapes.items() if name not in sharded}
    expected = {name: shard_shape(manifest, shape) for name, shape in sharded.items()}
    if not manifest.get("shard") or TOKENIZER_TENSOR in entries or entries.keys() & whole.keys():
        expected |= whole
        if tokenizer_fields(manifest)["kind"] == "json" and TOKENIZER_TENSOR not in entries:
            raise CorruptSnapshot(f"its tensor file lacks {TOKENIZER_TENSOR}")
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


def snapshot_shapes(manifest: dict[str, Any], vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Of the whole tensors of the manifest's run, without a tokenizer."""
    config = read_config(manifest)
    parameters = parameter_shapes(config.model, vocab_size=vocab_size, block_size=config.data.block_size)
    states = state_shapes(parameters, config.optimizer)
    shapes = {f"model.{name}": shape for name, shape in parameters.items()}
    return shapes | {f"optimizer.{name}": shape for name, shape in states.items()}


def is_sharded(manifest: dict[str, Any], name: str, shape: tuple[int, ...]) -> bool:
    """Whether each of several parts has some rows of this tensor; `shape` is that of the whole one."""
    shard = manifest.get("shard")
    if not shard or not shape:
        return False
    return name.startswith("optimizer.") or (shard["weights"] and name.startswith("model."))


def shard_shape(manifest: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the rows that a part has of a sharded tensor."""
    shard = manifest["shard"]
    return (len(split_rows(shape[0], shard["workers"])[shard["rank"]]), *shape[1:])


def check_tokenizer(manifest: dict[str, Any], entries: Entries) -> int:
    """Rows of the embedding. Raises CorruptSnapshot for a tokenizer that cannot be the run's."""
    fields = tokenizer_fields(manifest)
    entry = entries.get(TOKENIZER_TENSOR)
    may_be_elsewhere = bool(manifest.get("shard")) and entry is None
    if (entry is not None) != (fields["kind"] == "json") and not may_be_elsewhere:
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
    tensor = snapshot.read(TOKENIZER_TENSOR) if TOKENIZER_TENSOR in snapshot.entries else None
    return make_tokenizer(snapshot.manifest, tensor)


def make_tokenizer(manifest: dict[str, Any], tensor: Tensor | None) -> Tokenizer | None:
    """The tokenizer of a manifest and the tensor that carries it, if one does. Raises UserError."""
    fields = tokenizer_fields(manifest)
    if fields["kind"] == "none":
        return None
    content = manifest["vocabulary"].encode() if tensor is None else tensor.numpy().tobytes()
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


def snapshot_vocab_size(manifest: dict[str, Any]) -> int:
    """Rows of the model's embedding."""
    return int(tokenizer_fields(manifest).get("vocab_size") or len(manifest["vocabulary"]))


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


def fit_weights(
    tensors: dict[str, Tensor], shapes: Mapping[str, tuple[int, ...]], origin: str
) -> dict[str, Tensor]:
    """The tensors for a model of these shapes; learned positions are cut. Raises UserError for another's."""
    if "wpe.weight" in shapes and "wpe.weight" in tensors:
        tensors = tensors | {"wpe.weight": tensors["wpe.weight"][: shapes["wpe.weight"][0]]}
    there = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    check_shapes(there, shapes, origin)
    return tensors


def check_shapes(
    there: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    here: Mapping[str, tuple[int, ...]],
    origin: str,
) -> None:
    """Raises UserError unless tensors of these shapes and types are those of a model of the shapes `here`."""
    wrong = []
    for name, shape in here.items():
        found: Any = there[name][0] if name in there else "missing"
        if name in there and not there[name][1].is_floating_point:
            found = there[name][1]
        if found != shape:
            wrong.append(f"{name}: {found} -> {shape}")
    surplus = there.keys() - here.keys()
    if wrong or surplus:
        reasons = wrong[:3] + ([f"{len(surplus)} tensors that this model lacks"] if surplus else [])
        raise UserError(f"{origin} holds the weights of another model ({'; '.join(reasons)})")


def load_weights(model: GPT, tensors: dict[str, Tensor], origin: str) -> None:
    """Copy every weight; learned positions are cut to block_size. Raises UserError for another model's."""
    parameters = dict(model.named_parameters())
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    tensors = fit_weights(tensors, shapes, origin)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
