"""`model.arch=gpt2`: GPT-2 (Radford et al. 2019), and its form in transformers, GPT2LMHeadModel.

Learned position embeddings, `wpe`, are added to those of the tokens, `wte`. Norms are LayerNorm with weight
and bias, and the MLP has a tanh-approximated GELU. Every linear layer of a block has a bias, and the head is
tied to `wte`. Initial matrices are N(0, 0.02), in `c_proj` N(0, 0.02 / sqrt(2 n_layer)); the second number is
the standard deviation.
"""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from mingpt.base.rows import Shape
from mingpt.config import ModelConfig
from mingpt.model.gpt import ARCHITECTURES, GPT, Embedding
from mingpt.model.hf import Convertible
from mingpt.model.operations import PositionTables


class GPT2(GPT, Convertible):
    norm, activation, bias = nn.LayerNorm, "gelu", True
    hf_model_type, hf_dropouts = "gpt2", ("resid_pdrop", "embd_pdrop", "attn_pdrop")

    def make_modules(self, config: ModelConfig) -> None:
        self.wte = Embedding(self.vocab_size, config.n_embd)
        self.wpe = Embedding(self.block_size, config.n_embd)
        self.positions = PositionTables(self.block_size)
        self.h = nn.ModuleList(self.make_block(config) for _ in range(config.n_layer))
        self.ln_f = self.norm(config.n_embd)

    def initial_std(self, name: str, shape: Shape) -> float:
        return 0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        return self.wte(tokens) + self.wpe.weight[start : start + tokens.size(1)]

    @staticmethod
    def hf_fixed_fields(config: ModelConfig) -> dict[str, tuple[Any, ...]]:
        return {
            "n_inner": (None, 4 * config.n_embd),
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
        }

    @staticmethod
    def hf_names(name: str) -> list[str]:
        return [f"transformer.{name}"]

    @staticmethod
    def hf_convert(name: str, parts: Sequence[Tensor], config: ModelConfig) -> list[Tensor]:
        return [part.t() if name.startswith("h.") and part.ndim == 2 else part for part in parts]


ARCHITECTURES["gpt2"] = GPT2
