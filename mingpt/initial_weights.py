"""Weights to start a run with: those of another run, or of a model in Hugging Face's format."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from mingpt.config import ModelConfig
from mingpt.data import Tokenizer, load_named_tokenizer, parse_tokenizer_json
from mingpt.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.hf_folder import Folder, HuggingFaceFolder, is_hf_folder, read_folder
from mingpt.model import from_gpt2
from mingpt.snapshot import names_a_snapshot, open_snapshot, read_safetensors
from mingpt.weights import check_model, fit_weights, snapshot_tokenizer

log = logging.getLogger(__name__)
EMBEDDINGS = ("wte.weight", "lm_head.weight")
VOCABULARIES = ("vocab.json", "encoder.json")  # of GPT-2, in place of a tokenizer.json
SHAPE_SETTINGS = ("arch", "n_layer", "n_head", "n_embd")


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
