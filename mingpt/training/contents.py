"""What a snapshot of a run must hold: the names, shapes and types of its tensors, and its tokenizer.

Names, shapes and types are checked before any weight is read.
"""

import hashlib

import torch

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.rows import Shape
from mingpt.config import Config
from mingpt.data import Tokenizer, kind_of, load_tokenizer
from mingpt.model import parameter_shapes
from mingpt.optim import state_shapes
from mingpt.snapshot.manifest import Manifest, TokenizerFields, max_tokenizer_bytes
from mingpt.snapshot.reading import Entries


def check_model(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
    """Check that a snapshot holds the whole state of a run; else raise CorruptSnapshot.

    The state is a model's parameters and the optimizer's state, in float32, and the tokenizer, if the run has
    one. The manifest's configuration describes the model. Other tensors raise CorruptSnapshot. `entries` has
    the types and shapes of the snapshot's tensors, and `tokenizer` the tokenizer's bytes (None: there are
    none). No tensor is read, and no tokenizer of kind "json" is parsed, because that takes a long time.
    Raises UserError if a training loop of the user's own, not a run, wrote the snapshot.
    """
    missing = sorted({"config", "tokenizer", "data", "software"} - manifest.model_fields_set)
    if len(missing) == 4:  # not corrupt: a different program wrote the snapshot, which stays as it is
        raise UserError(
            f"the snapshot of step {manifest.step} was written by a training loop of your own, not by a run: "
            "choose another folder"
        )
    if missing:
        raise CorruptSnapshot(f"its manifest lacks {missing[0]}")
    if manifest.settings.model.n_layer > len(entries):
        raise CorruptSnapshot(f"its {len(entries)} tensors cannot have config.model.n_layer blocks")
    try:
        shapes = tensor_shapes(manifest.settings, manifest.tokenizer.vocab_size)
    except UserError as error:
        raise CorruptSnapshot(f"its configuration is that of no model: {error}") from None
    for name, shape in sorted(shapes.items()):
        if name not in entries:
            raise CorruptSnapshot(f"its tensor file lacks {name}")
        if entries[name].shape != shape:
            raise CorruptSnapshot(
                f"its tensor {name} has shape {list(entries[name].shape)}, not {list(shape)}"
            )
        if entries[name].dtype != torch.float32:
            raise CorruptSnapshot(f"its tensor {name} has type {entries[name].dtype}, not float32")
    surplus = sorted(entries.keys() - shapes.keys())
    if surplus:
        raise CorruptSnapshot(f"its tensor file holds {surplus[0]!r}, which its model lacks")
    if manifest.tokenizer.kind == "none":
        if tokenizer is not None:
            raise CorruptSnapshot("its manifest tells of no tokenizer, and there is one")
    elif tokenizer is None or manifest.tokenizer.kind != "json":
        try:
            load_carried(manifest, tokenizer)  # raises if there are no bytes
        except ValueError as error:
            raise CorruptSnapshot(f"its tokenizer is damaged: {error}") from None


def tensor_shapes(config: Config, vocab_size: int) -> dict[str, Shape]:
    """Return the unsharded shape of each parameter and of each tensor of the optimizer's state, by name.

    Each name begins with "model." or "optimizer.". Raises UserError if these settings are those of no model.
    """
    sizes = {"vocab_size": vocab_size, "block_size": config.data.block_size}
    parameters = parameter_shapes(config.model, **sizes)
    states = state_shapes(parameter_shapes(config.model, **sizes, is_trained=True), config.optimizer)
    shapes = {f"model.{name}": shape for name, shape in parameters.items()}
    return shapes | {f"optimizer.{name}": shape for name, shape in states.items()}


def make_tokenizer(manifest: Manifest, content: bytes | None) -> Tokenizer | None:
    """Return a snapshot's tokenizer, whose bytes are `content`; None if the manifest names no tokenizer.

    Raises UserError if the tokenizer is missing, cannot be used, or needs a package that is not installed.
    """
    if manifest.tokenizer.kind == "none":
        return None
    try:
        return load_carried(manifest, content)
    except ValueError as error:
        raise UserError(f"the tokenizer of the snapshot cannot be used: {error}") from None


def load_carried(manifest: Manifest, content: bytes | None) -> Tokenizer:
    """Return the tokenizer that the manifest describes, and whose bytes are `content`.

    Raises ValueError if `content` is None, is no tokenizer of the manifest's kind, or does not have the
    SHA-256 in the manifest (if one is there). Also raises ValueError if this kind is unknown, or needs a
    package that is not installed, or if the tokenizer has more tokens than the model's embedding has rows.
    """
    about = manifest.tokenizer
    if content is None or about.sha256 not in (None, hashlib.sha256(content).hexdigest()):
        raise ValueError("its bytes are not those that the manifest tells of")
    tokenizer = load_tokenizer(about.kind, content)
    if len(tokenizer) > about.vocab_size:
        raise ValueError(f"it has {len(tokenizer)} tokens, and the model {about.vocab_size}")
    return tokenizer


def describe_tokenizer(tokenizer: Tokenizer | None, vocab_size: int) -> TokenizerFields:
    """Return what a manifest says about `tokenizer`, which is None if the run has no tokenizer.

    `vocab_size` is the number of rows of the model's embedding. Raises UserError if the tokenizer has more
    bytes than `max_tokenizer_bytes` allows.
    """
    if tokenizer is None:
        return TokenizerFields(kind="none", vocab_size=vocab_size)
    content, limit = tokenizer.to_bytes(), max_tokenizer_bytes(vocab_size)
    if len(content) > limit:
        raise UserError(
            f"the tokenizer has {len(content):,} bytes, and a snapshot of a model with {vocab_size:,} tokens "
            f"takes at most {limit:,}: name a smaller tokenizer by data.tokenizer"
        )
    digest = hashlib.sha256(content).hexdigest()
    return TokenizerFields(kind=kind_of(tokenizer), vocab_size=vocab_size, sha256=digest)
