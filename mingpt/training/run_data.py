"""The tokenizer and the tokens of a run, the same on all ranks."""

import logging

from mingpt.base.errors import UserError
from mingpt.config import Config
from mingpt.data import TOKENIZERS, Corpus, Data, Tokenizer, tokenize
from mingpt.data.corpus import TextData
from mingpt.data.json_tokenizer import parse_named_tokenizer, read_named_tokenizer
from mingpt.data.shards import ShardData
from mingpt.snapshot import Manifest, StoredState
from mingpt.training.contents import make_tokenizer

log = logging.getLogger(__name__)
Origin = tuple[Manifest, bytes | None]  # of the snapshot that a fresh run takes its weights from
Named = tuple[str, bytes | UserError]  # what data.tokenizer names, and its bytes or why they cannot be read


def tokenizer_path(config: Config, has_snapshot: bool, is_restart: bool, beside: str) -> str | None:
    """Return the path or name of the tokenizer that rank 0 has to read for all ranks; None if it reads none.

    `beside` is the path of the tokenizer.json beside rank 0's data, "" if there is none.
    """
    name = config.data.tokenizer
    if name in TOKENIZERS or (has_snapshot and (name == "auto" or is_restart)):
        return None
    return name if name != "auto" else beside or None


def read_tokenizer(path: str) -> Named:
    """Return (`path`, bytes of the tokenizer at `path`); if the read fails, (`path`, the UserError)."""
    try:
        return path, read_named_tokenizer(path)
    except UserError as error:  # it does not matter to a run whose snapshot has a tokenizer
        return path, error


def load_corpus(
    config: Config,
    data: Data,
    state: StoredState | None,
    is_restart: bool,
    origin: Origin | None,
    named: Named | None,
    is_told: bool,
) -> Corpus:
    """Tokenize `data` for a run that goes on from `state`; None means a fresh run.

    `origin` has the manifest and the tokenizer's bytes of the snapshot from which a fresh run takes its
    weights, if any. `named` is what `read_tokenizer` has returned on rank 0; None if nothing had to be read.
    With `is_told`, log what is missing. Raises UserError if a tokenizer or the data cannot be used.
    """
    rows = state.manifest.tokenizer.vocab_size if state else None
    if state:
        tokenizer = snapshot_tokenizer(config, data, state, is_restart, named, is_told)
    else:
        tokenizer = choose_tokenizer(config, data, origin, named)
        if isinstance(data, ShardData):
            data.check_tokenizer(tokenizer, config.data.tokenizer)
        if origin and config.data.vocab_size is None:
            # `match_weights` refuses weights that have fewer rows than the tokenizer has tokens.
            rows = max(origin[0].tokenizer.vocab_size, len(tokenizer) if tokenizer else 0)
    if tokenizer is None and is_told:
        log.info("no tokenizer: no bits per byte, and no samples of text")
    corpus = tokenize(data, config.data, tokenizer, rows)
    if tokenizer is not None and corpus.val_bytes is None and is_told:
        log.warning("no bits per byte: no meta.json says how many bytes of text the validation shards hold")
    return corpus


def snapshot_tokenizer(
    config: Config, data: Data, state: StoredState, is_restart: bool, named: Named | None, is_told: bool
) -> Tokenizer | None:
    """Return the tokenizer of the snapshot; None if the snapshot has no tokenizer.

    Raises UserError if the tokenizer cannot be used. In a job's first generation, also raises UserError if
    data.tokenizer names a different tokenizer. If the named tokenizer cannot be read or made, the snapshot's
    tokenizer is returned, and with `is_told` a log line says why. For `named` see `load_corpus`.
    """
    carried = make_tokenizer(state.manifest, state.tokenizer)
    if config.data.tokenizer == "auto" or is_restart:
        return carried
    try:
        wanted = choose_tokenizer(config, data, None, named)
    except UserError as error:
        if is_told:
            log.warning(f"{error}; the snapshot's tokenizer is used")
        return carried
    if wanted is None or carried is None or wanted.fingerprint() != carried.fingerprint():
        raise UserError(
            f"data.tokenizer={config.data.tokenizer} is not the tokenizer of this run's snapshots: "
            "leave it out, or choose another run_dir, with snapshot.init_from to keep the weights"
        )
    return carried


def choose_tokenizer(
    config: Config, data: Data, origin: Origin | None, named: Named | None
) -> Tokenizer | None:
    """Return the tokenizer that data.tokenizer names: read from a file, or made from the text.

    data.tokenizer=auto stands for the first of these that exists:

    - The tokenizer.json beside the data.
    - The tokenizer of `origin`. For a text, an origin without a tokenizer raises UserError.
    - A tokenizer of characters for a text, None for token shards.

    Raises UserError if the tokenizer cannot be used. For `origin` and `named` see `load_corpus`.
    """
    if named:
        path, content = named
        if isinstance(content, UserError):
            raise content
        return parse_named_tokenizer(content, path, "data.tokenizer")
    if origin is None or config.data.tokenizer in TOKENIZERS:
        return data.train_tokenizer(config.data.tokenizer)
    tokenizer = make_tokenizer(*origin)
    if tokenizer is None and isinstance(data, TextData):
        raise UserError(
            "the weights of snapshot.init_from have no tokenizer that can be read: name it by "
            "data.tokenizer, as a tokenizer.json or gpt2"
        )
    return tokenizer
