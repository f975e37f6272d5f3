"""Convert models to and from Hugging Face's transformers, which then computes the same function.

FORMS describes each architecture that transformers also has. Converting there and back gives the same
tensors, bit by bit. transformers is imported on first use.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.config import Config, ModelConfig, check
from mingpt.model.operations import EPSILON, ROTARY_BASE

# {a parameter of `modern`: its name or names in transformers}. The names in BLOCK are without the prefix
# "h.N." or "model.layers.N.", and without the suffix ".weight".
OUTSIDE = {"wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
BLOCK = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}


def gpt2_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "n_inner": (None, 4 * config.n_embd),
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
    }


def gpt2_names(name: str) -> list[str]:
    return [f"transformer.{name}"]


def gpt2_layout(name: str, tensor: Tensor, n_head: int) -> Tensor:
    return tensor.t() if name.startswith("h.") and tensor.ndim == 2 else tensor


def modern_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    return {
        "intermediate_size": (4 * config.n_embd,),
        "num_key_value_heads": (config.n_head,),
        "head_dim": (config.n_embd // config.n_head,),
        "hidden_act": ("relu2",),
        "rms_norm_eps": (EPSILON,),
        "rope_parameters": ({"rope_type": "default", "rope_theta": ROTARY_BASE},),
        "final_logit_softcapping": (None,),
        "attention_bias": (False,),
        "tie_word_embeddings": (False,),
    }


def modern_names(name: str) -> list[str]:
    if name in OUTSIDE:
        return [OUTSIDE[name]]
    _, number, part = name.removesuffix(".weight").split(".", 2)
    return [f"model.layers.{number}.{its}.weight" for its in BLOCK[part]]


def modern_layout(name: str, tensor: Tensor, n_head: int) -> Tensor:
    if not name.endswith("c_attn.weight"):
        return tensor
    # transformers rotates in the other direction: the halves of each head of queries and keys change places.
    heads = tensor.view(3, n_head, 2, -1, tensor.shape[1]).clone()
    heads[:2] = heads[:2].flip(2)
    return heads.view(tensor.shape)


@dataclass(frozen=True)
class Form:
    """How transformers configures an architecture, and names and lays out the parameters."""

    model_type: str  # in config.json
    dropouts: tuple[str, ...]  # fields of config.json for dropout; all get the probability model.dropout
    # Returns {field of config.json: its allowed values}; an export writes the first of these values.
    fields: Callable[[ModelConfig], dict[str, tuple[Any, ...]]]
    # Returns the names of transformers' tensors that hold a parameter, in the order of its rows.
    names: Callable[[str], list[str]]
    # Takes a parameter's name, the parameter and n_head; returns it in the layout of transformers, and the
    # other way round.
    layout: Callable[[str, Tensor, int], Tensor]


FORMS = {  # by model.arch
    "gpt2": Form("gpt2", ("resid_pdrop", "embd_pdrop", "attn_pdrop"), gpt2_fields, gpt2_names, gpt2_layout),
    "modern": Form("nanochat", ("attention_dropout",), modern_fields, modern_names, modern_layout),
}


def form_of(arch: str) -> Form:
    """Return the form of an architecture. Raises UserError if transformers has no such architecture."""
    if arch not in FORMS:
        raise UserError(
            f"a model of model.arch={arch} cannot be written in Hugging Face's format; sample.py and "
            "snapshot.init_from read the run itself"
        )
    return FORMS[arch]


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
    form = form_of(config.arch)
    fields: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_position_embeddings": block_size,
        "n_ctx": block_size,  # which llama.cpp's converter of GPT-2 reads
        "hidden_size": config.n_embd,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": "float32",
    }
    fields |= dict.fromkeys(form.dropouts, config.dropout)
    return fields | {name: allowed[0] for name, allowed in form.fields(config).items()}


def config_from_hf(theirs: Any) -> ModelConfig:
    """Return the ModelConfig that `theirs`, a configuration of transformers, describes.

    Dropout has its default value. Raises UserError for a model that no architecture of this program can
    compute, and pydantic's ValidationError if a size is not a positive whole number.
    """
    kinds = {form.model_type: arch for arch, form in FORMS.items()}
    check_field("model_type", theirs.model_type, tuple(kinds))
    config = ModelConfig(
        arch=kinds[theirs.model_type],  # type: ignore[arg-type]
        n_layer=theirs.num_hidden_layers,
        n_head=theirs.num_attention_heads,
        n_embd=theirs.hidden_size,
    )
    check(Config(model=config))
    for name, allowed in FORMS[config.arch].fields(config).items():
        check_field(name, getattr(theirs, name, allowed[0]), allowed)
    check_field("quantization_config", getattr(theirs, "quantization_config", None), (None,))
    return config


def check_field(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        usable = " and ".join(repr(one) for one in allowed)
        raise UserError(
            f"this is a model of another kind: {name} is {value!r:.100}, and only {usable} can be used"
        )


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return {name in transformers: contiguous tensor} for `tensors`, a GPT's parameters by name.

    gpt2's tied head is left out, because it is not a parameter.
    """
    form, found = form_of(config.arch), dict[str, Tensor]()
    for name, tensor in tensors.items():
        names = form.names(name)
        parts = form.layout(name, tensor, config.n_head).chunk(len(names))
        found |= {its: part.contiguous() for its, part in zip(names, parts, strict=True)}
    return found


def from_hf(theirs: dict[str, Tensor], config: ModelConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters `names` of GPT, made from `theirs`, tensors of transformers.

    This is the inverse of `to_hf`. The tensors that are used are removed from `theirs`, so that only one
    weight at a time is in memory twice. The results may not be contiguous. Raises KeyError if a tensor is
    missing, and an error of torch if tensors do not fit together.
    """
    form, ours = form_of(config.arch), {}
    for name in names:
        parts = [theirs.pop(its) for its in form.names(name)]
        ours[name] = form.layout(name, torch.cat(parts), config.n_head)
    return ours
