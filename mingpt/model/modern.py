"""`model.arch=modern`: a GPT of today, and its form in transformers, NanoChatForCausalLM.

| | `gpt2` | `modern` |
|---|---|---|
| positions | learned, added (`wpe`) | rotary, on queries and keys (Su et al. 2021) |
| normalisation | LayerNorm with weight and bias | RMSNorm, no parameters, on `wte`, queries and keys too |
| MLP | 4 x, tanh-approximated GELU | 4 x, squared ReLU |
| biases | in all linear layers of a block | nowhere |
| head | tied to `wte` | its own matrix |
| weights begin as | N(0, 0.02) | N(0, 1 / sqrt(fan_in)); `wte` N(0, 1); head zero |
| `c_proj` begins as | N(0, 0.02 / sqrt(2 n_layer)) | zero |

N(0, s) has standard deviation s.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mingpt.config import ModelConfig
from mingpt.model.gpt import ARCHITECTURES, GPT
from mingpt.model.hf import Convertible
from mingpt.model.operations import EPSILON, ROTARY_BASE, rms_norm

# {a parameter's name: its name or names in transformers}. The names in BLOCK are without the prefix "h.N." or
# "model.layers.N.", and without the suffix ".weight".
OUTSIDE = {"wte.weight": "model.embed_tokens.weight", "lm_head.weight": "lm_head.weight"}
BLOCK = {
    "attn.c_attn": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn.c_proj": ("self_attn.o_proj",),
    "mlp.c_fc": ("mlp.fc1",),
    "mlp.c_proj": ("mlp.fc2",),
}


class Modern(GPT, Convertible):
    hf_model_type, hf_dropouts = "nanochat", ("attention_dropout",)

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        return rms_norm(self.wte(tokens))

    @staticmethod
    def hf_fixed_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
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

    @staticmethod
    def hf_names(name: str) -> list[str]:
        if name in OUTSIDE:
            return [OUTSIDE[name]]
        _, number, part = name.removesuffix(".weight").split(".", 2)
        return [f"model.layers.{number}.{its}.weight" for its in BLOCK[part]]

    @staticmethod
    def hf_convert(name: str, parts: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        if len(parts) == 1:
            return list(parts)
        *turned, value = parts
        heads = [part.view(config.n_head, 2, -1, part.shape[1]) for part in turned]
        return [*(head.flip(1).flatten(0, 2) for head in heads), value]


ARCHITECTURES["modern"] = Modern
