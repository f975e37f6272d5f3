"""A small model, its optimizer and a few steps of training, for tests."""

from typing import Literal

import torch
from torch import nn

from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.model import GPT
from mingpt.optim import Optimizer

Name = Literal["adamw", "muon"]
Arch = Literal["gpt2", "modern"]
NAMES: list[Name] = ["adamw", "muon"]
ARCHITECTURES: list[Arch] = ["gpt2", "modern"]


def make_model(name: Name, arch: Arch) -> tuple[GPT, Optimizer]:
    """The same weights at each call."""
    torch.manual_seed(0)
    model = GPT(ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=16), vocab_size=11, block_size=8)
    return model, Optimizer(model, OptimizerConfig(name=name))


def compute_gradients(model: nn.Module, step: int) -> None:
    """From a batch that depends on the step alone."""
    torch.manual_seed(step)
    tokens = torch.randint(0, 11, (2, 9))
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        compute_gradients(model, step)
        optimizer.step(0.01)
        optimizer.zero_grad()
