"""The models of Hugging Face's transformers that compute what these compute: names, tensors and config.json.

`gpt2` is GPT2LMHeadModel: its Conv1D matrices are (in, out), ours (out, in), and its head is `wte`.
`modern` is NanoChatForCausalLM: queries, keys and values have a matrix each, and its rotary positions turn
the other way, which is the same as swapping the halves of every head's features in queries and keys.

Nothing of transformers is imported. Each direction is the exact inverse of the other, bit by bit.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.config import Config, ModelConfig, check
from mingpt.model.cpu_ops import EPSILON
from mingpt.model.gpt import Shape, parameter_shapes
from mingpt.model.layers import ROTARY_BASE

TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
BUFFERS = (".attn.bias", ".attn.masked_bias")  # causal masks, which old files of GPT-2 hold
CLASSES = {"gpt2": "GPT2LMHeadModel", "modern": "NanoChatForCausalLM"}
MODEL_TYPES = {"gpt2": "gpt2", "modern": "nanochat"}
MAX_SIZE = 1 << 28  # of anything counted in a config.json, so that products of two stay below 2**63
# Ours: theirs, between model.layers.N. and .weight
BLOCK = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.fc1", "mlp.c_proj": "mlp.fc2"}
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# What a config.json means where it leaves a size out.
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
    "modern": {
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
    },
}
ALIASES = dict(zip(SIZES["modern"], SIZES["gpt2"], strict=True))  # names that GPT-2's fields also have


@dataclass(frozen=True)
class HFModel:
    """What a config.json describes, as arguments of GPT."""

    config: ModelConfig
    vocab_size: int
    block_size: int


def hf_config(
    config: ModelConfig, *, vocab_size: int, block_size: int, end_of_text: int | None = None
) -> dict[str, Any]:
    """The content of config.json. Sampling in transformers ends at `end_of_text`, if there is one."""
    sizes = (vocab_size, block_size, config.n_embd, config.n_layer, config.n_head)
    fields: dict[str, Any] = {
        "architectures": [CLASSES[config.arch]],
        "model_type": MODEL_TYPES[config.arch],
        **dict(zip(SIZES[config.arch], sizes, strict=True)),
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "pad_token_id": None,
        "dtype": "float32",
    }
    if config.arch == "gpt2":
        return fields | {
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "n_inner": None,
            "resid_pdrop": config.dropout,
            "embd_pdrop": config.dropout,
            "attn_pdrop": config.dropout,
            "tie_word_embeddings": True,
        }
    return fields | {
        "intermediate_size": 4 * config.n_embd,
        "num_key_value_heads": config.n_head,
        "hidden_act": "relu2",
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        "final_logit_softcapping": None,
        "attention_bias": False,
        "attention_dropout": config.dropout,
        "tie_word_embeddings": False,
    }


def hf_model_of(fields: Mapping[str, Any]) -> HFModel:
    """The inverse of `hf_config`. Dropout is GPT-2's `resid_pdrop`, NanoChat's `attention_dropout`.

    Raises UserError, naming the field, for a model that these architectures do not compute.
    """
    names = {name: arch for arch, name in MODEL_TYPES.items()}
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in names:
        raise other("model_type", model_type, "'gpt2' and 'nanochat'")
    arch = names[model_type]
    if arch == "gpt2":
        fields = {ALIASES.get(name, name): value for name, value in fields.items()}
    sizes = [read_size(fields, name, default) for name, default in SIZES[arch].items()]
    vocab_size, block_size, n_embd, n_layer, n_head = sizes
    for name, (default, *allowed) in fixed_fields(arch, n_embd, n_head).items():
        value = fields.get(name, default)
        if value not in allowed:
            raise other(name, value, " and ".join(json.dumps(one) for one in allowed).replace('"', "'"))
    name, default = ("resid_pdrop", 0.1) if arch == "gpt2" else ("attention_dropout", 0.0)
    dropout = fields.get(name, default)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        raise other(name, dropout, "a number from 0 to below 1")
    if arch == "modern":
        check_rotary(fields.get("rope_parameters"))
    config = ModelConfig(
        arch="gpt2" if arch == "gpt2" else "modern",
        n_layer=n_layer,
        n_head=n_head,
        n_embd=n_embd,
        dropout=float(dropout),
    )
    check(Config(model=config))
    return HFModel(config, vocab_size, block_size)


def fixed_fields(arch: str, n_embd: int, n_head: int) -> dict[str, tuple[Any, ...]]:
    """{field: (the value that its absence means, values that are computed here...)}."""
    common: dict[str, tuple[Any, ...]] = {"quantization_config": (None, None)}
    if arch == "gpt2":
        return common | {
            "n_inner": (None, 4 * n_embd, None),
            "activation_function": ("gelu_new", "gelu_new", "gelu_pytorch_tanh"),  # one function
            "layer_norm_epsilon": (1e-5, 1e-5),
            "scale_attn_weights": (True, True),
            "scale_attn_by_inverse_layer_idx": (False, False),
            "add_cross_attention": (False, False),
            "tie_word_embeddings": (True, True),
        }
    return common | {
        "intermediate_size": (8192, 4 * n_embd),
        "num_key_value_heads": (None, n_head, None),
        "head_dim": (n_embd // n_head, n_embd // n_head),
        "hidden_act": ("relu2", "relu2"),
        "rms_norm_eps": (1e-6, EPSILON),
        "rope_theta": (ROTARY_BASE, ROTARY_BASE),
        "rope_scaling": (None, None),
        "final_logit_softcapping": (15.0, None),
        "attention_bias": (False, False),
        "tie_word_embeddings": (False, False),
    }


def check_rotary(parameters: Any) -> None:
    """Raises UserError unless the rotary positions of a NanoChat configuration are those of `modern`."""
    if parameters is None:
        return
    if not isinstance(parameters, dict):
        raise other("rope_parameters", parameters, "an object")
    allowed = {"rope_type": "default", "rope_theta": ROTARY_BASE, "partial_rotary_factor": 1.0}
    for name, value in parameters.items():
        if name not in allowed or value != allowed[name]:
            raise other(f"rope_parameters.{name}", value, json.dumps(allowed.get(name)).replace('"', "'"))


def read_size(fields: Mapping[str, Any], name: str, default: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise other(name, value, f"a whole number from 1 to {MAX_SIZE:,}")
    return value


def other(name: str, value: Any, allowed: str) -> UserError:
    shown = repr(value) if isinstance(value, str) else json.dumps(value)
    if len(shown) > 100:
        shown = f"{shown[:100]}..."
    return UserError(f"this is a model of another kind: {name} is {shown}, and only {allowed} can be used")


def to_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The parameters of GPT as the tensors of transformers' class, all contiguous."""
    return to_gpt2(tensors) if config.arch == "gpt2" else to_nanochat(tensors, config.n_head)


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The inverse of `to_hf`, for tensors whose shapes are in order; also without their common prefix."""
    return from_gpt2(tensors) if config.arch == "gpt2" else from_nanochat(tensors, config.n_head)


def to_gpt2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head is left out: it is `wte`."""
    return {
        f"transformer.{name}": tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor.contiguous()
        for name, tensor in tensors.items()
    }


def from_gpt2(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """GPT2LMHeadModel's tensors for `arch: gpt2`, without buffers and without the head, which is `wte`."""
    named = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    return {
        name: tensor.t().contiguous() if name.endswith(TRANSPOSED) else tensor
        for name, tensor in named.items()
        if not is_redundant(name, "gpt2")
    }


def is_redundant(name: str, arch: str) -> bool:
    """Whether a file may hold this tensor, but need not: GPT-2's causal masks, and its head, `wte`."""
    if arch != "gpt2":
        return False
    return name.endswith(BUFFERS) or name.removeprefix("transformer.") == "lm_head.weight"


def to_nanochat(tensors: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    found = {}
    for name, tensor in tensors.items():
        _, number, part = (name.removesuffix(".weight") + "..").split(".", 2)
        part, layer = part.rstrip("."), f"model.layers.{number}"
        if name == "wte.weight":
            found["model.embed_tokens.weight"] = tensor.contiguous()
        elif name == "lm_head.weight":
            found[name] = tensor.contiguous()
        elif part == "attn.c_attn":
            query, key, value = tensor.chunk(3)  # (C, C) each
            parts = (swap_halves(query, n_head), swap_halves(key, n_head), value.contiguous())
            found |= {f"{layer}.{its}.weight": one for its, one in zip(QKV, parts, strict=True)}
        else:
            found[f"{layer}.{BLOCK[part]}.weight"] = tensor.contiguous()
    return found


def from_nanochat(tensors: Mapping[str, Tensor], n_head: int) -> dict[str, Tensor]:
    named = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    ours = {"wte.weight": named["embed_tokens.weight"], "lm_head.weight": named["lm_head.weight"]}
    for name in named:
        if not name.endswith(f"{QKV[0]}.weight"):
            continue
        layer = name.removesuffix(f".{QKV[0]}.weight")
        block = "h." + layer.removeprefix("layers.")
        query, key, value = (named[f"{layer}.{part}.weight"] for part in QKV)
        parts = (swap_halves(query, n_head), swap_halves(key, n_head), value)
        ours[f"{block}.attn.c_attn.weight"] = torch.cat(parts)
        for part, its in BLOCK.items():
            ours[f"{block}.{part}.weight"] = named[f"{layer}.{its}.weight"]
    return ours


def swap_halves(weight: Tensor, n_head: int) -> Tensor:
    """Swap the first and the second half of every head's D rows in a (H D, C) matrix; its own inverse."""
    rows, width = weight.shape
    return weight.view(n_head, 2, rows // n_head // 2, width).flip(1).reshape(rows, width)


def hf_shapes(model: HFModel) -> dict[str, Shape]:
    """The shapes of the tensors that `to_hf` gives for this model. Allocates little."""
    ours = parameter_shapes(model.config, vocab_size=model.vocab_size, block_size=model.block_size)
    empty = {name: torch.empty(shape, device="meta") for name, shape in ours.items()}
    return {name: tuple(tensor.shape) for name, tensor in to_hf(empty, model.config).items()}
