"""The data of a run, the same on all ranks, and the tokenizer that goes with it."""

import functools
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from mingpt import weights
from mingpt.config import Config, DataConfig
from mingpt.data import (
    TOKENIZERS,
    Corpus,
    Data,
    ShardData,
    TextData,
    Tokenizer,
    is_shards,
    kind_of,
    load_tokenizer,
    open_shards,
    parse_tokenizer_json,
    read_bytes,
    read_named_tokenizer,
    tokenize,
    train_tokenizer,
)
from mingpt.distributed import DistributedContext
from mingpt.errors import UserError
from mingpt.snapshot import Snapshot

log = logging.getLogger(__name__)


def load_data(config: Config, context: DistributedContext) -> Data:
    """The text, or the token shards, the same on all ranks. Raises UserError if there is none. Collective."""
    any_shards = any(context.all_gather_object(is_shards(config.data.path)))
    if any_shards:
        return load_shards(config.data, context)
    content = read_on_first_node(context, lambda: read_bytes(config.data), "the text")
    return context.heartbeat_while(lambda: TextData(content, config.data))


def load_shards(config: DataConfig, context: DistributedContext) -> ShardData:
    """Every rank reads them itself. Raises UserError unless all nodes have the same files. Collective."""
    data = context.run_with_heartbeat(lambda: open_shards(config.path, config.val_fraction))
    fingerprints = context.all_gather_object(data.fingerprint)
    if len(set(fingerprints)) == 1:
        return data
    hosts, files = zip(*context.all_gather_object((platform.node(), data.files)), strict=True)
    other = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
    name = first_difference(files[0], files[other])
    raise UserError(
        f"the token shards in {config.path} differ between nodes: {name} on {hosts[other]} is not that on "
        f"{hosts[0]}; copy the same files to every node"
    )


def first_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """The name of the first file that is not in both, or not with the same fingerprint."""
    return next((name for name in [*old, *new] if old.get(name) != new.get(name)), "their order")


def read_on_first_node(context: DistributedContext, read: Callable[[], bytes], what: str) -> bytes:
    """What the first node that can read it has, on all ranks. Raises UserError if none can. Collective."""
    local_ranks = context.all_gather_object(context.launch.local_rank)
    errors: list[UserError] = []
    for source in [rank for rank, local_rank in enumerate(local_ranks) if local_rank == 0]:
        reads = context.rank == source
        try:
            content = context.run_with_heartbeat(functools.partial(read_if, reads, read))
        except UserError as error:  # raised on all ranks
            errors.append(error)
            continue
        if errors and context.rank == 0:
            log.warning("%s; %s is read by worker %d", errors[0], what, source)
        return context.broadcast_bytes(content, source)
    raise errors[0]


def read_if(reads: bool, read: Callable[[], bytes]) -> bytes | None:
    return read() if reads else None


def load_corpus(
    config: Config,
    context: DistributedContext,
    data: Data,
    snapshot: Snapshot | None,
    initial: weights.OtherWeights | None,
) -> Corpus:
    """The data as tokens, for the run that goes on from the snapshot, if there is one. Collective.

    `initial`, on rank 0, are the weights of snapshot.init_from. Raises UserError.
    """
    tokenizer = choose_tokenizer(config, context, data, snapshot, initial)
    rows = weights.snapshot_vocab_size(snapshot) if snapshot else None
    return context.heartbeat_while(lambda: tokenize(data, config.data, tokenizer, rows))


def choose_tokenizer(
    config: Config,
    context: DistributedContext,
    data: Data,
    snapshot: Snapshot | None,
    initial: weights.OtherWeights | None,
) -> Tokenizer | None:
    """That of the snapshot to go on with, if there is one; else as `data.tokenizer` says. Collective.

    Raises UserError, also if `data.tokenizer` names another tokenizer than the snapshot's.
    """
    theirs = weights.snapshot_tokenizer(snapshot) if snapshot else None
    try:
        ours = read_configured(config.data, context, data)
    except UserError as error:
        if theirs is None:
            raise
        if context.rank == 0:
            log.warning("%s; the snapshot's tokenizer is used", error)
        return theirs
    if ours is None and snapshot is None:
        ours = share_tokenizer(context, initial, data)
        if ours is None and isinstance(data, TextData):
            ours = train_tokenizer(data, config.data)
        return ours
    if ours is not None and theirs is not None and ours.fingerprint() != theirs.fingerprint():
        raise UserError(
            f"data.tokenizer={config.data.tokenizer} is another tokenizer than that of the snapshots of this "
            "run: choose another run_dir"
        )
    return ours or theirs


def read_configured(config: DataConfig, context: DistributedContext, data: Data) -> Tokenizer | None:
    """The tokenizer that `data.tokenizer` names, or the one beside the data, if there is one. Collective."""
    name = config.tokenizer
    if name in TOKENIZERS and isinstance(data, TextData):
        return context.heartbeat_while(lambda: train_tokenizer(data, config))
    if name in TOKENIZERS:
        raise UserError(
            f"data.tokenizer={name} is made from a text, and data.path {config.path} holds token shards: "
            "give the tokenizer.json that they were made with"
        )
    if name == "auto":
        beside = find_beside(config, data)
        found = context.all_gather_object(beside is not None)
        if not any(found):
            return None
        name = str(beside or "tokenizer.json")
    content = read_on_first_node(context, lambda: read_named_tokenizer(name), "the tokenizer")
    try:
        return context.heartbeat_while(lambda: parse_tokenizer_json(content))
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"data.tokenizer {name} cannot be used: {error}") from None


def find_beside(config: DataConfig, data: Data) -> Path | None:
    """The tokenizer.json in the folder of the data, if there is one on this node."""
    if "://" in config.path.removeprefix("file://"):
        return None
    folder = data.folder if isinstance(data, ShardData) else Path(config.path.removeprefix("file://")).parent
    path = folder / "tokenizer.json"
    return path if path.is_file() else None


def share_tokenizer(
    context: DistributedContext, initial: weights.OtherWeights | None, data: Data
) -> Tokenizer | None:
    """The tokenizer of the weights to start with, from rank 0, on all ranks. Collective.

    None without one, and for characters where the data is a text, which has its own.
    """
    found = None
    if initial is not None and initial.tokenizer is not None:
        kind = kind_of(initial.tokenizer)
        if kind == "json" or isinstance(data, ShardData):
            found = kind, initial.tokenizer.to_bytes()
    found = context.broadcast_object(found, 0)
    return load_tokenizer(*found) if found else None
