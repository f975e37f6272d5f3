"""Convert GPT to and from the models of Hugging Face's transformers that compute the same.

`gpt2` is GPT2LMHeadModel: its Conv1D matrices are (in, out), ours (out, in), and its head is `wte`.
`modern` is NanoChatForCausalLM: queries, keys and values have a matrix each, and its rotary positions turn
the other way, which is the same as swapping the halves of every head's features in queries and keys.

Each direction is the exact inverse of the other, bit by bit. transformers is imported on first use.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.config import Config, ModelConfig, check
from mingpt.model.operations import EPSILON, ROTARY_BASE

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files of GPT-2 hold
DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")  # of GPT-2; here one number serves all
CONFIGS = {"gpt2": "GPT2Config", "modern": "NanoChatConfig"}
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}
# Names here: names in transformers, between model.layers.N. and .weight
BLOCK = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}


def import_transformers() -> Any:
    """Import transformers, which takes seconds, and let it log errors only. Raises UserError if missing."""
    try:
        import transformers
    except ImportError as error:
        raise UserError(
            f"Hugging Face's format needs the package transformers, which cannot be imported ({error}): "
            "pip install 'transformers>=5' (the extra hf)"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def hf_fields(
    config: ModelConfig, *, vocab_size: int, block_size: int, end_of_text: int | None = None
) -> dict[str, Any]:
    """Return the arguments of transformers' configuration class, whose sampling ends at `end_of_text`."""
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
    dropouts = DROPOUTS if config.arch == "gpt2" else ("attention_dropout",)
    fields |= dict.fromkeys(dropouts, config.dropout)
    return fields | {name: allowed[0] for name, allowed in fixed_fields(config).items()}


def fixed_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
    """Return {field of transformers' configuration: its allowed values}; an export writes the first value."""
    if config.arch == "gpt2":
        return {
            "n_inner": (None, 4 * config.n_embd),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # one function
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        }
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


def config_from_hf(theirs: Any) -> ModelConfig:
    """Return the ModelConfig that a configuration of transformers describes, with ModelConfig's dropout.

    Raises UserError, naming the field, for a model that neither `gpt2` nor `modern` can compute.
    """
    kinds = {"gpt2": "gpt2", "nanochat": "modern"}
    if theirs.model_type not in kinds:
        raise another_kind("model_type", theirs.model_type, tuple(kinds))
    config = ModelConfig(
        arch=kinds[theirs.model_type],  # type: ignore[arg-type]
        n_layer=theirs.num_hidden_layers,
        n_head=theirs.num_attention_heads,
        n_embd=theirs.hidden_size,
    )
    check(Config(model=config))
    for name, allowed in (fixed_fields(config) | {"quantization_config": (None,)}).items():
        value = getattr(theirs, name, allowed[0])
        if value not in allowed:
            raise another_kind(name, value, allowed)
    return config


def another_kind(name: str, value: Any, allowed: tuple[Any, ...]) -> UserError:
    usable = " and ".join(repr(one) for one in allowed)
    return UserError(
        f"this is a model of another kind: {name} is {value!r:.100}, and only {usable} can be used"
    )


def hf_names(name: str, arch: str) -> list[str]:
    """Return the names of transformers' tensors that make up a parameter of GPT, in the order of its rows."""
    if arch == "gpt2":
        return [f"transformer.{name}"]
    if name == "lm_head.weight":
        return [name]
    if name == "wte.weight":
        return ["model.embed_tokens.weight"]
    _, number, part = name.removesuffix(".weight").split(".", 2)
    return [f"model.layers.{number}.{its}.weight" for its in BLOCK[part]]


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return the parameters of GPT as transformers' tensors, contiguous, without gpt2's tied head."""
    found = dict[str, Tensor]()
    for name, tensor in tensors.items():
        names = hf_names(name, config.arch)
        parts = convert(name, tensor.chunk(len(names)), config)
        found |= {its: part.contiguous() for its, part in zip(names, parts, strict=True)}
    return found


def from_hf(theirs: dict[str, Tensor], config: ModelConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Return the parameters `names` of GPT from `theirs`, transformers' tensors: the inverse of `to_hf`.

    The tensors that are used are removed from `theirs`, so that none is held twice. Results may not be
    contiguous. Raises KeyError if a tensor is missing.
    """
    ours = {}
    for name in names:
        parts = convert(name, [theirs.pop(its) for its in hf_names(name, config.arch)], config)
        ours[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
    return ours


def convert(name: str, parts: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
    """Return the matrices of a parameter of GPT as transformers has them, or the reverse, which is the same.

    Some of gpt2's are transposed. In modern's queries and keys, (H D, C), the first and the second half of
    every head's D rows change places.
    """
    if config.arch == "gpt2" and name.endswith(TRANSPOSED):
        return [part.t() for part in parts]
    if len(parts) == 1:
        return list(parts)
    *turned, value = parts
    heads = [part.view(config.n_head, 2, -1, part.shape[1]) for part in turned]
    return [*(head.flip(1).flatten(0, 2) for head in heads), value]
