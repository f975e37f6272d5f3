"""Weights to start a run with: those of another run, or of a model in Hugging Face's format.

In a folder in Hugging Face's format, the package transformers reads only the configuration. This module reads
the weights, from safetensors files and never from a pickle. A model is accepted only if an architecture in
mingpt/model/ can compute it (model/hf.py); no tensor may be missing, unknown or of a different shape.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import read_json
from mingpt.config import ModelConfig
from mingpt.data import Tokenizer, load_named_tokenizer, parse_tokenizer_json
from mingpt.model import parameter_shapes
from mingpt.model.hf import BUFFERS, config_from_hf, from_hf, import_transformers
from mingpt.snapshot import open_snapshot
from mingpt.snapshot.contents import check_model, fit_weights, snapshot_tokenizer
from mingpt.snapshot.reading import check_finite

GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
CONFIG, WEIGHTS, TOKENIZER, PICKLE = "config.json", "model.safetensors", "tokenizer.json", "pytorch_model.bin"
INDEX = f"{WEIGHTS}.index.json"
FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
CONVERT = (  # a command that adds safetensors to the folder
    'python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('{0}').save_pretrained('{0}')\""
)
VOCABULARIES = ("vocab.json", "encoder.json")  # GPT-2's files, in place of a tokenizer.json
SHAPE_SETTINGS = ("arch", "n_layer", "n_head", "n_embd")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class InitialWeights:
    """A model's weights on the CPU, by their names in mingpt/model/, and its tokenizer and settings."""

    tensors: dict[str, Tensor]
    tokenizer: Tokenizer | None  # None: not known
    model: ModelConfig
    where: str  # path, URL or name of the weights, for messages
    block_size: int  # number of positions with which the weights were trained

    @property
    def vocab_size(self) -> int:
        """The number of rows of the embedding."""
        return len(self.tensors["wte.weight"])


def open_weights(where: str, best: bool = False, asked: str = "snapshot.init_from=") -> InitialWeights:
    """Return the weights that `where` names: a path or URL, or else one of GPT2_NAMES, which is downloaded.

    If `where` is a run folder, the newest snapshot is read. With `best`, or if "@best" is appended to
    `where`, the snapshot with the lowest validation loss is read. `where` may also be a file of a snapshot,
    or a folder in Hugging Face's format. Raises UserError if the weights cannot be used. For weights in
    Hugging Face's format, `best` is ignored, "@best" raises UserError, and the message begins with `asked`
    (how the user asked for the weights) and `where`.
    """
    asks_best = where.endswith("@best") and not os.path.exists(where)
    if asks_best:
        where, best = where.removesuffix("@best"), True
    is_on_hub = where in GPT2_NAMES and not os.path.exists(where)
    try:
        if is_on_hub or os.path.isfile(os.path.join(where, CONFIG)):
            if asks_best:
                raise UserError("only a run has a best snapshot: leave @best out")
            return read_folder(where, is_on_hub)
    except Exception as error:  # transformers raises the errors of many packages
        reason = " ".join(str(error).split())[:500]
        raise UserError(f"{asked}{where} cannot be used: {reason or repr(error)}") from None
    snapshot = open_snapshot(where, check_model, weights_only=True, best=best)
    tensors, tokenizer = (snapshot.tensors("model."), snapshot_tokenizer(snapshot))
    config = snapshot.config
    return InitialWeights(tensors, tokenizer, config.model, where, config.data.block_size)


def read_folder(where: str, is_on_hub: bool) -> InitialWeights:
    """Return the weights, as float32, in the folder `where`, which is in Hugging Face's format.

    With `is_on_hub`, `where` is one of GPT2_NAMES, and its folder is downloaded from Hugging Face's hub. May
    raise any error, because many packages take part.
    """
    transformers = import_transformers()
    folder = Path(download(where) if is_on_hub else where)
    theirs = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    config = config_from_hf(theirs)
    found = read_tensors(folder)  # `from_hf` takes out what it uses
    if config.n_layer > len(found):  # parameter_shapes takes time in proportion
        raise UserError(f"{CONFIG} asks for {config.n_layer:,} layers, and there are {len(found):,} tensors")
    sizes = {"vocab_size": theirs.vocab_size, "block_size": theirs.max_position_embeddings}
    shapes = parameter_shapes(config, **sizes)
    try:
        tensors = from_hf(found, config, shapes)
    except KeyError as error:
        raise UserError(f"the tensor {error} is missing") from None
    for name, tensor in tensors.items():
        if tensor.shape != shapes[name]:
            there = tuple(tensor.shape)
            raise UserError(f"the tensor {name} has shape {there}, and {CONFIG} asks for {shapes[name]}")
        tensors[name] = tensor.float()
        check_finite(name, tensors[name])
    head = found.pop("lm_head.weight", tensors["wte.weight"]).float()
    if not torch.equal(head, tensors["wte.weight"]):
        raise UserError(
            "the tensor lm_head.weight differs from wte.weight, and GPT-2 has one matrix for both"
        )
    if found:
        raise UserError(f"it holds {min(found)!r:.100}, which such a model lacks")
    return InitialWeights(tensors, folder_tokenizer(folder), config, where, sizes["block_size"])


def download(name: str) -> str:
    """Download the GPT-2 `name` from Hugging Face's hub; return its folder in the cache of huggingface_hub.

    The package huggingface_hub is installed together with transformers. Without a network, an earlier
    download is used; if there was no earlier download, an error of huggingface_hub is raised.
    """
    from huggingface_hub import snapshot_download

    return snapshot_download(f"openai-community/{name}", allow_patterns=[CONFIG, WEIGHTS, TOKENIZER])


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors in WEIGHTS, else in INDEX's files, except BUFFERS, by their names in transformers.

    Raises UserError if the index names a file that is not beside it, or if a tensor's type is not one of
    FLOATS. Also raises UserError if the folder has a pickle instead of these files.
    """
    files = {WEIGHTS}
    if not (folder / WEIGHTS).exists():
        if (folder / INDEX).exists():
            files = set(read_json(folder / INDEX)["weight_map"].values())
        elif any(folder.glob(f"{PICKLE}*")):
            raise UserError(
                f"it has only {PICKLE}, a pickle, which can run any code when it is loaded; if you trust "
                f"it, convert it by {CONVERT.format(folder)}"
            )
    found = {}
    for name in files:
        if os.path.basename(name) != name:
            raise UserError(f"{INDEX} names {name!r:.100}, and only files beside it are read")
        for key, tensor in load_file(folder / name).items():
            if not key.endswith(BUFFERS):
                has_prefix = key.startswith(("transformer.", "model.", "lm_head."))
                found[key if has_prefix else f"transformer.{key}"] = tensor
    types = {tensor.dtype for tensor in found.values()}
    for other in types - FLOATS:
        raise UserError(f"it holds {other}, as quantized models do, and weights are floats of 16 to 64 bits")
    if torch.float64 in types:
        log.info(f"{folder} holds float64, which is rounded to float32")
    return found


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer of a folder in Hugging Face's format.

    Returns None if the folder has neither the file TOKENIZER nor one of VOCABULARIES. Raises ValueError,
    perhaps a UserError, if the tokenizer cannot be used.
    """
    if (folder / TOKENIZER).exists():
        return parse_tokenizer_json((folder / TOKENIZER).read_bytes())
    if any((folder / name).exists() for name in VOCABULARIES):
        return load_named_tokenizer(str(folder), "snapshot.init_from")
    log.info(f"{folder} has no tokenizer")
    return None


def match_weights(
    initial: InitialWeights,
    config: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    tokenizer: Tokenizer | None,
) -> dict[str, Tensor]:
    """Return the weights of `initial`, by name, for a new run with parameters of the shapes `shapes`.

    `config` has the new run's model settings, and `tokenizer` is the new run's tokenizer. Learned
    positions past those in `shapes` are left out. Raises UserError if the models differ otherwise, or if both
    tokenizers are known and differ.
    """
    origin = f"snapshot.init_from={initial.where}"
    there, here = vars(initial.model), vars(config)
    wrong = [f"model.{name}={there[name]}" for name in SHAPE_SETTINGS if there[name] != here[name]]
    if wrong:
        raise UserError(f"{origin} holds the weights of another model: set {' '.join(wrong)}")
    if tokenizer and initial.tokenizer and tokenizer.fingerprint() != initial.tokenizer.fingerprint():
        raise UserError(
            f"{origin} was trained with another tokenizer than this run's, and its embeddings fit only that "
            "one: leave data.tokenizer out, keep no other tokenizer.json beside the data, or drop "
            "snapshot.init_from"
        )
    tensors = fit_weights(initial.tensors, shapes, origin)
    log.info(f"weights taken from {initial.where}")
    return tensors
