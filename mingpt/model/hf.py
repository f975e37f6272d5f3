"""Convert GPT to the models of Hugging Face's transformers that compute the same function, and back.

An architecture that inherits from Convertible can be converted. Converting there and back gives the same
tensors, bit by bit. transformers is imported on first use.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.config import Config, ModelConfig, check
from mingpt.config.settings import Arch
from mingpt.model.gpt import architecture

BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files of GPT-2 hold


class Convertible(ABC):
    """An architecture that transformers also has. Its class inherits from GPT and from this class."""

    hf_model_type: str  # model_type in config.json
    hf_dropouts: tuple[str, ...]  # fields of config.json for dropout; all get the probability model.dropout

    @staticmethod
    @abstractmethod
    def hf_fixed_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
        """Return {field of config.json: its allowed values}; an export writes the first of these values."""

    @staticmethod
    @abstractmethod
    def hf_names(name: str) -> list[str]:
        """Return the names of transformers' tensors that hold parameter `name`, in the order of its rows."""

    @staticmethod
    @abstractmethod
    def hf_convert(name: str, parts: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        """Convert a parameter's `parts`, one for each of `hf_names`, to the layout of transformers, or back.

        Both directions are the same operation.
        """


def convertible(arch: str) -> type[Convertible]:
    """Return the class for a value of model.arch. Raises UserError if the class is not Convertible."""
    kind = architecture(arch)
    if not issubclass(kind, Convertible):
        raise UserError(
            f"a model of model.arch={arch} cannot be written in Hugging Face's format; sample.py and "
            "snapshot.init_from read the run itself"
        )
    return kind


def import_transformers() -> Any:
    """Import transformers, which takes seconds, and make it log only errors and show no progress bars.

    Raises UserError if transformers cannot be imported.
    """
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"Hugging Face's format needs the package transformers, which cannot be imported "
            f"({reason_of(error)}): pip install --upgrade 'transformers>=5' (the extra hf)"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def hf_fields(
    config: ModelConfig, *, vocab_size: int, block_size: int, end_of_text: int | None = None
) -> dict[str, Any]:
    """Return the arguments for transformers' configuration class.

    `end_of_text` is the token at which generation ends; None if there is no such token.
    """
    kind = convertible(config.arch)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": block_size,
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": "float32",
    }
    fields |= dict.fromkeys(kind.hf_dropouts, config.dropout)
    return fields | {name: allowed[0] for name, allowed in kind.hf_fixed_fields(config).items()}


def config_from_hf(theirs: Any) -> ModelConfig:
    """Return the ModelConfig that `theirs`, a configuration of transformers, describes.

    Dropout has its default value. Raises UserError, which names the field, for a model that no architecture
    of this program can compute.
    """
    classes = {arch: architecture(arch) for arch in get_args(Arch)}
    kinds = {kind.hf_model_type: arch for arch, kind in classes.items() if issubclass(kind, Convertible)}
    if theirs.model_type not in kinds:
        raise another_kind("model_type", theirs.model_type, tuple(kinds))
    config = ModelConfig(
        arch=kinds[theirs.model_type],  # type: ignore[arg-type]
        n_layer=theirs.num_hidden_layers,
        n_head=theirs.num_attention_heads,
        n_embd=theirs.hidden_size,
    )
    check(Config(model=config))
    fixed = convertible(config.arch).hf_fixed_fields(config) | {"quantization_config": (None,)}
    for name, allowed in fixed.items():
        value = getattr(theirs, name, allowed[0])
        if value not in allowed:
            raise another_kind(name, value, allowed)
    return config


def another_kind(name: str, value: Any, allowed: tuple[Any, ...]) -> UserError:
    usable = " and ".join(repr(one) for one in allowed)
    return UserError(
        f"this is a model of another kind: {name} is {value!r:.100}, and only {usable} can be used"
    )


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return {name in transformers: contiguous tensor} for `tensors`, a GPT's parameters by name.

    gpt2's tied head is left out, because it is not a parameter.
    """
    kind, found = convertible(config.arch), dict[str, Tensor]()
    for name, tensor in tensors.items():
        names = kind.hf_names(name)
        parts = kind.hf_convert(name, tensor.chunk(len(names)), config)
        found |= {its: part.contiguous() for its, part in zip(names, parts, strict=True)}
    return found


def from_hf(theirs: dict[str, Tensor], config: ModelConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters `names` of GPT, made from `theirs`, tensors of transformers.

    This is the inverse of `to_hf`. The tensors that are used are removed from `theirs`, so that no weight is
    in memory twice. The results may not be contiguous. Raises KeyError if a tensor is missing.
    """
    kind, ours = convertible(config.arch), {}
    for name in names:
        parts = kind.hf_convert(name, [theirs.pop(its) for its in kind.hf_names(name)], config)
        ours[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return ours
