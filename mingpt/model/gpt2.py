"""`model.arch=gpt2`: GPT-2 (Radford et al. 2019).

Learned position embeddings, `wpe`, are added to those of the tokens, `wte`. Norms are LayerNorm with weight
and bias, and the MLP has a tanh-approximated GELU. Every linear layer of a block has a bias, and the head is
tied to `wte`. Initial matrices are N(0, 0.02), in `c_proj` N(0, 0.02 / sqrt(2 n_layer)); the second number is
the standard deviation.
"""

import math

from torch import Tensor, nn

from mingpt.base.rows import Shape
from mingpt.config import ModelConfig
from mingpt.model.gpt import ARCHITECTURES, GPT, Embedding
from mingpt.model.operations import PositionTables


class GPT2(GPT):
    norm, activation, bias = nn.LayerNorm, "gelu", True

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


ARCHITECTURES["gpt2"] = GPT2
