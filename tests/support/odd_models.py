"""Models that a user may register; `register` puts one of them in the place of model.arch=gpt2."""

import torch
from torch import Tensor, nn

import mingpt.model.gpt2  # noqa: F401 - before `register`, because it enters itself
from mingpt.base.rows import Shape
from mingpt.config import ModelConfig
from mingpt.model.gpt import ARCHITECTURES, GPT, MLP, Block, CausalSelfAttention, Linear


class Experts(nn.Module):
    """Eight MLPs. A token goes to one of them, so in a small micro-batch some get no token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = Linear(config.n_embd, 8, bias=False)
        self.experts = nn.ModuleList(MLP(config, "gelu", bias=False) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = torch.softmax(self.gate(x), dim=-1).max(dim=-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            taken = chosen == number
            if taken.any():
                y[taken] = share[taken].unsqueeze(-1) * expert(x[taken])
        return y


class Unusual(nn.Module):
    """An MLP with a weight without dimensions, a frozen weight, an unused weight, and buffers."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mlp = MLP(config, "gelu", bias=True)
        self.temperature = nn.Parameter(torch.empty(()))
        self.unused = nn.Parameter(torch.empty(3, 2))
        self.frozen = Linear(config.n_embd, config.n_embd)
        self.frozen.requires_grad_(False)
        self.register_buffer("kept", torch.empty(config.n_embd, dtype=torch.bool))
        self.register_buffer("shift", torch.empty((), dtype=torch.int32))
        self.init_buffers()

    def init_buffers(self) -> None:
        self.get_buffer("kept").fill_(True)[:2] = False
        self.get_buffer("shift").fill_(1)

    def initial_weight(self, name: str, shape: Shape, generator: torch.Generator) -> Tensor:
        return torch.empty(shape).uniform_(0.5, 1.5, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        kept, shift = self.get_buffer("kept"), self.get_buffer("shift")
        y: Tensor = self.mlp(x) * self.temperature + self.frozen(x) * kept + 0.1 * shift
        return y


class Odd(GPT):
    def initial_std(self, name: str, shape: Shape) -> float:
        return 0.3


class MixtureOfExperts(Odd):
    def make_block(self, config: ModelConfig) -> Block:
        return Block(config, self.norm, CausalSelfAttention(config, False), Experts(config))


class UnusualWeights(Odd):
    def make_block(self, config: ModelConfig) -> Block:
        return Block(config, self.norm, CausalSelfAttention(config, False), Unusual(config))


MODELS = {"experts": MixtureOfExperts, "unusual": UnusualWeights}


def register(name: str) -> None:
    ARCHITECTURES["gpt2"] = MODELS[name]
