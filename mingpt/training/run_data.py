"""The data of a run, the same on all ranks, and the tokenizer that goes with it."""

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping
from pathlib import Path

from mingpt.base.errors import UserError
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
    local_path,
    open_shards,
    read_bytes,
    read_named_tokenizer,
    tokenize,
    train_tokenizer,
)
from mingpt.data.source import parse_named_tokenizer
from mingpt.distributed import DistributedContext
from mingpt.snapshot import StoredState
from mingpt.snapshot.contents import make_tokenizer
from mingpt.training.initial_weights import InitialWeights
from mingpt.training.run_folder import read_on

log = logging.getLogger(__name__)


def load_data(config: Config, context: DistributedContext) -> Data:
    """Read the text or open the token shards, the same on all ranks. Collective.

    All ranks raise UserError if the data cannot be used, or if token shards differ between nodes.
    """
    any_shards = any(context.all_gather_object(is_shards(config.data.path)))
    if any_shards:
        return load_shards(config.data, context)
    content = read_on_first_node(context, lambda: read_bytes(config.data), "the text")
    return context.on_all(lambda: TextData(content, config.data))


def load_shards(config: DataConfig, context: DistributedContext) -> ShardData:
    """Open the token shards on each rank. Collective.

    All ranks raise UserError if shards are unusable, differ between nodes, or data.sha256 is set.
    """
    if config.sha256 is not None:
        raise UserError(
            "data.sha256 is for a text; token shards have a fingerprint of their own: leave it out"
        )
    data = context.on_all(lambda: open_shards(config.path, config.val_fraction))
    fingerprints = context.all_gather_object(data.fingerprint)
    if len(set(fingerprints)) == 1:
        return data
    files, hosts = context.all_gather_object(data.files), [place.host for place in context.places]
    other = next(rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0])
    name = first_difference(files[0], files[other]) or "their order"
    raise UserError(
        f"the token shards in {config.path} differ between nodes: {name} on {hosts[other]} is not that on "
        f"{hosts[0]}; copy the same files to every node"
    )


def first_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """Return the name of the first file that is not in both, or whose fingerprints differ; or None."""
    return next((name for name in [*old, *new] if old.get(name) != new.get(name)), None)


def read_on_first_node(context: DistributedContext, read: Callable[[], bytes], what: str) -> bytes:
    """Return, on all ranks, what `read` returns on the first node where it works; `what` is for the log.

    Raises the first node's UserError on all ranks if it works on none. Collective.
    """
    errors: list[UserError] = []
    for source in [rank for rank, place in enumerate(context.places) if place.local_rank == 0]:
        try:
            content = read_on(source, context, read)
        except UserError as error:  # raised on all ranks
            errors.append(error)
            continue
        if errors and context.rank == 0:
            log.warning(f"{errors[0]}; {what} is read by worker {source}")
        return content
    raise errors[0]


def load_corpus(
    config: Config,
    context: DistributedContext,
    data: Data,
    snapshot: StoredState | None,
    is_restart: bool,
    initial: InitialWeights | None,
) -> Corpus:
    """Tokenize the data for a run that goes on from `snapshot`, or for a fresh run if None. Collective.

    `initial`: the weights of snapshot.init_from on rank 0, None on others. All ranks raise UserError if no
    tokenizer suits, or the data cannot be used.
    """
    if snapshot is None:
        tokenizer = choose_tokenizer(config.data, context, data, initial)
        check_prepared_with(config.data, data, tokenizer)
        rows = initial_rows(config.data, context, tokenizer, initial)
    else:
        keeps_tokenizer = config.data.tokenizer == "auto" or is_restart
        tokenizer = snapshot_tokenizer(config.data, context, data, snapshot, keeps_tokenizer)
        rows = snapshot.manifest.tokenizer.vocab_size
    if tokenizer is None and context.rank == 0 and not is_restart:
        log.info("no tokenizer: no bits per byte, and no samples of text")
    corpus = context.on_all(lambda: tokenize(data, config.data, tokenizer, rows))
    is_unknown = tokenizer is not None and tokenizer.token_bytes() is None and corpus.val_bytes is None
    if is_unknown and context.rank == 0 and not is_restart:
        log.warning(
            "no bits per byte: the tokenizer loses some of the text, or nothing tells how many bytes of text "
            "the tokens stand for"
        )
    return corpus


def snapshot_tokenizer(
    config: DataConfig, context: DistributedContext, data: Data, snapshot: StoredState, keeps_it: bool
) -> Tokenizer | None:
    """Return the tokenizer of the snapshot; None if it has none. Collective.

    Raises UserError if it cannot be used. Unless `keeps_it`, also raises UserError if data.tokenizer names
    another tokenizer; one that cannot be read is only logged.
    """
    carried = context.on_all(lambda: make_tokenizer(snapshot.manifest, snapshot.tokenizer))
    if keeps_it:
        return carried
    try:
        named = read_named(config, context, data)
    except UserError as error:
        if context.rank == 0:
            log.warning(f"{error}; the snapshot's tokenizer is used")
        return carried
    if carried is None or named.fingerprint() != carried.fingerprint():
        raise UserError(
            f"data.tokenizer={config.tokenizer} is another tokenizer than that of the snapshots of this run: "
            "leave it out, or choose another run_dir, with snapshot.init_from to keep the weights"
        )
    return carried


def choose_tokenizer(
    config: DataConfig, context: DistributedContext, data: Data, initial: InitialWeights | None
) -> Tokenizer | None:
    """Return the tokenizer of a fresh run, as data.tokenizer says. Raises UserError. Collective.

    For auto: tokenizer.json beside the data, else the one of `initial`, the weights to start with; else
    characters, or None for shards.
    """
    if config.tokenizer != "auto":
        return read_named(config, context, data)
    path = find_tokenizer_file(config, data)
    found = context.all_gather_object(path is not None)
    if any(found):
        return read_tokenizer(context, path, config.path)
    tokenizer = broadcast_tokenizer(context, initial, data)
    if tokenizer is None and isinstance(data, TextData):
        tokenizer = context.on_all(lambda: train_tokenizer(data, config))
    return tokenizer


def read_named(config: DataConfig, context: DistributedContext, data: Data) -> Tokenizer:
    """Return the tokenizer that data.tokenizer, which is not auto, names: read, or made from the text `data`.

    Raises UserError, also if it is made from a text and `data` is token shards. Collective.
    """
    name = config.tokenizer
    if name not in TOKENIZERS:
        return read_tokenizer(context, name, name)
    if isinstance(data, TextData):
        return context.on_all(lambda: train_tokenizer(data, config))
    raise UserError(
        f"data.tokenizer={name} is made from a text, and data.path {config.path} holds token shards: give "
        "the tokenizer.json that they were made with"
    )


def read_tokenizer(context: DistributedContext, path: Path | str | None, place: str) -> Tokenizer:
    """Return the tokenizer that the first node with the file reads; `path` is None on nodes without it.

    Raises UserError on all ranks if no node can read it; the message names the path, or else `place`.
    Collective.
    """

    def read() -> bytes:
        if path is None:
            raise UserError(f"there is no tokenizer.json beside {place} on {platform.node()}")
        return read_named_tokenizer(str(path))

    content, name = read_on_first_node(context, read, "the tokenizer"), str(path or place)
    return context.on_all(lambda: parse_named_tokenizer(content, name, "data.tokenizer"))


def find_tokenizer_file(config: DataConfig, data: Data) -> Path | None:
    """Return the tokenizer.json in the folder of the data, if this node has one; None for a URL."""
    text = local_path(config.resolved_path)
    if text is None:
        return None
    folder = data.folder if isinstance(data, ShardData) else Path(text).parent
    path = folder / "tokenizer.json"
    return path if path.is_file() else None


def broadcast_tokenizer(
    context: DistributedContext, initial: InitialWeights | None, data: Data
) -> Tokenizer | None:
    """Return the tokenizer of the weights to start with, from rank 0, on all ranks. Collective.

    None without such weights, for shards if the weights have no tokenizer, and for a text if they have one of
    characters, since the text makes its own. Raises UserError if the data is a text and the weights have no
    tokenizer: characters would take over none of their rows.
    """
    content = b""

    def choose() -> str | None:
        nonlocal content
        if initial is None or (initial.tokenizer is None and isinstance(data, ShardData)):
            return None
        if initial.tokenizer is None:
            raise UserError(
                f"snapshot.init_from={initial.where} has no tokenizer that can be read: name it by "
                "data.tokenizer, as a tokenizer.json or gpt2; data.tokenizer=char begins with characters"
            )
        kind = kind_of(initial.tokenizer)
        if kind != "json" and isinstance(data, TextData):
            return None
        content = initial.tokenizer.to_bytes()
        return kind

    kind = context.on_rank(0, choose)
    if kind is None:
        return None
    received = read_on(0, context, lambda: content)
    return context.on_all(lambda: load_tokenizer(kind, received))


def check_prepared_with(config: DataConfig, data: Data, tokenizer: Tokenizer | None) -> None:
    """Raise UserError if meta.json beside the shards names another tokenizer than `tokenizer`."""
    meta = data.meta if isinstance(data, ShardData) else None
    content = tokenizer.to_tokenizer_json() if tokenizer else None
    if meta is None or content is None or meta["tokenizer"]["sha256"] is None:
        return
    if hashlib.sha256(content).hexdigest() != meta["tokenizer"]["sha256"]:
        raise UserError(
            f"the token shards in {config.path} were prepared with another tokenizer than "
            f"data.tokenizer={config.tokenizer}: leave that at auto, with their tokenizer.json beside them"
        )


def initial_rows(
    config: DataConfig,
    context: DistributedContext,
    tokenizer: Tokenizer | None,
    initial: InitialWeights | None,
) -> int | None:
    """Return the number of embedding rows of rank 0's `initial`, on all ranks. Collective.

    None without `initial`, or if data.vocab_size is set, the tokenizers differ or the rows are too few.
    """
    rows = None
    if initial is not None and config.vocab_size is None:
        there = initial.tokenizer.fingerprint() if initial.tokenizer else None
        here = tokenizer.fingerprint() if tokenizer else None
        # After tokens were added to a tokenizer, it may have more tokens than its model has rows.
        enough = initial.vocab_size >= (len(tokenizer) if tokenizer else 0)
        rows = initial.vocab_size if there == here and enough else None
    return context.broadcast_object(rows, 0)
