"""The data of a run, the same on all ranks, and the tokenizer that the run uses."""

import logging
import platform
from functools import partial
from pathlib import Path

from mingpt.base.errors import UserError
from mingpt.config import Config, DataConfig
from mingpt.data import TOKENIZERS, Corpus, Data, Tokenizer, read_named_tokenizer, tokenize
from mingpt.data.corpus import TextData, open_data, tokenizer_file
from mingpt.data.json_tokenizer import parse_named_tokenizer
from mingpt.data.shards import ShardData
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Manifest, Snapshot, StoredState
from mingpt.training.contents import make_tokenizer
from mingpt.training.run_folder import read_on, refuse_where_it_fails

log = logging.getLogger(__name__)


def load_data(config: Config, context: DistributedContext) -> Data:
    """Read the text, or open the token shards, at data.path on each rank. Collective.

    Raises the errors of `refuse_where_it_fails` if a rank cannot use its data. All ranks raise UserError if
    the data differ between nodes.
    """
    loaded: list[Data] = []

    def load(is_turn: bool) -> None:
        if is_turn:
            loaded.append(open_data(config.data))

    # One rank of each node downloads a text from a URL; the others then find it in the cache.
    is_first = context.places[context.rank].local_rank == 0
    refuse_where_it_fails(context, partial(load, is_first))
    refuse_where_it_fails(context, partial(load, not is_first))
    data = loaded[0]
    fingerprints = context.all_gather_object(data.fingerprint)
    other = next((rank for rank, one in enumerate(fingerprints) if one != fingerprints[0]), 0)
    if other == 0:
        return data
    hosts = f"{context.places[0].host} and {context.places[other].host}"
    raise UserError(
        f"the data in {config.data.path} differ between {hosts}: copy the same files to every node"
    )


def load_corpus(
    config: Config,
    context: DistributedContext,
    data: Data,
    snapshot: StoredState | None,
    is_restart: bool,
    initial: Snapshot | None,
) -> Corpus:
    """Tokenize `data` for a run that goes on from `snapshot`; None means a fresh run. Collective.

    On rank 0 of a fresh run, `initial` is the snapshot of snapshot.init_from, if that is set; otherwise
    `initial` is None. With `is_restart`, data.tokenizer is not compared with the snapshot's tokenizer. All
    ranks raise UserError if a tokenizer cannot be read or is not suitable, or if the data cannot be used.
    """
    if snapshot is None:
        origin = None
        if config.snapshot.init_from:
            origin = context.on_rank(
                0, lambda: (initial.manifest, initial.read_tokenizer()) if initial else None
            )
        tokenizer = choose_tokenizer(config.data, context, data, origin)
        if isinstance(data, ShardData):
            data.check_tokenizer(tokenizer, config.data.tokenizer)
        rows = None
        if origin and config.data.vocab_size is None:
            # `match_weights` refuses weights that have fewer rows than the tokenizer has tokens.
            rows = max(origin[0].tokenizer.vocab_size, len(tokenizer) if tokenizer else 0)
    else:
        keeps_tokenizer = config.data.tokenizer == "auto" or is_restart
        tokenizer = snapshot_tokenizer(config.data, context, data, snapshot, keeps_tokenizer)
        rows = snapshot.manifest.tokenizer.vocab_size
    is_told = context.rank == 0 and not is_restart
    if tokenizer is None and is_told:
        log.info("no tokenizer: no bits per byte, and no samples of text")
    corpus = context.on_all(lambda: tokenize(data, config.data, tokenizer, rows))
    if tokenizer is not None and corpus.val_bytes is None and is_told:
        log.warning("no bits per byte: no meta.json says how many bytes of text the validation shards hold")
    return corpus


def snapshot_tokenizer(
    config: DataConfig, context: DistributedContext, data: Data, snapshot: StoredState, keeps_it: bool
) -> Tokenizer | None:
    """Return the tokenizer of the snapshot; None if the snapshot has no tokenizer. Collective.

    Raises UserError if the tokenizer cannot be used. Without `keeps_it`, also raises UserError if
    data.tokenizer names a different tokenizer. If the named tokenizer cannot be read or made, a warning is
    logged, and the snapshot's tokenizer is returned.
    """
    carried = context.on_all(lambda: make_tokenizer(snapshot.manifest, snapshot.tokenizer))
    if keeps_it:
        return carried
    try:
        named = choose_tokenizer(config, context, data)
    except UserError as error:
        if context.rank == 0:
            log.warning(f"{error}; the snapshot's tokenizer is used")
        return carried
    if named is None or carried is None or named.fingerprint() != carried.fingerprint():
        raise UserError(
            f"data.tokenizer={config.tokenizer} is not the tokenizer of this run's snapshots: "
            "leave it out, or choose another run_dir, with snapshot.init_from to keep the weights"
        )
    return carried


def choose_tokenizer(
    config: DataConfig,
    context: DistributedContext,
    data: Data,
    origin: tuple[Manifest, bytes | None] | None = None,
) -> Tokenizer | None:
    """Return the tokenizer that data.tokenizer names: read from a file, or made from the text. Collective.

    data.tokenizer=auto stands for the first of these that exists:

    - The tokenizer.json beside the data.
    - The tokenizer of `origin`: the manifest and the tokenizer's bytes of the snapshot that a fresh run takes
      its weights from. For a text, a snapshot without a tokenizer raises UserError.
    - A tokenizer of characters for a text, None for token shards.

    Raises UserError if the tokenizer cannot be used.
    """
    name = config.tokenizer
    if name in TOKENIZERS:
        return context.on_all(lambda: data.train_tokenizer(name))
    if name != "auto":
        return read_tokenizer(context, name, name)
    path = tokenizer_file(data)
    if any(context.all_gather_object(path is not None)):
        return read_tokenizer(context, path, config.path)
    if origin is None:
        return context.on_all(lambda: data.train_tokenizer(name))
    tokenizer = context.on_all(lambda: make_tokenizer(*origin))
    if tokenizer is None and isinstance(data, TextData):
        raise UserError(
            "the weights of snapshot.init_from have no tokenizer that can be read: name it by "
            "data.tokenizer, as a tokenizer.json or gpt2"
        )
    return tokenizer


def read_tokenizer(context: DistributedContext, path: Path | str | None, place: str) -> Tokenizer:
    """Return, on all ranks, the tokenizer that `path` names on rank 0. Collective.

    `path` is None on nodes without the file. All ranks raise UserError if rank 0 cannot read the file, or if
    it cannot be used. If `path` is None on rank 0, the message names `place`.
    """

    def read() -> bytes:
        if path is None:
            raise UserError(f"there is no tokenizer.json beside {place} on {platform.node()}")
        return read_named_tokenizer(str(path))

    content, name = read_on(0, context, read), str(path or place)
    return context.on_all(lambda: parse_named_tokenizer(content, name, "data.tokenizer"))
