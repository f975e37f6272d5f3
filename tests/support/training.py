"""A small model, its optimizer and a few steps of training, for tests."""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from mingpt.base.rows import RowMap
from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.distributed.transport import Transport
from mingpt.model import GPT
from mingpt.optim import Optimizer
from support.models import ARCHITECTURES as ARCHITECTURES
from support.models import Arch as Arch

Name = Literal["adamw", "muon"]
NAMES: list[Name] = ["adamw", "muon"]


def make_model(name: Name, arch: Arch) -> tuple[GPT, Optimizer]:
    torch.manual_seed(0)
    model = GPT(ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=16), vocab_size=11, block_size=8)
    return model, make_optimizer(model, OptimizerConfig(name=name))


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    weights = dict(model.named_parameters())
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    return Optimizer(weights, config, RowMap(shapes), Transport(0, 1))


def compute_gradients(model: nn.Module, step: int) -> None:
    torch.manual_seed(step)
    tokens = torch.randint(0, 11, (2, 9))
    model(tokens[:, :-1], tokens[:, 1:])[1].backward()


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        compute_gradients(model, step)
        given = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
        optimizer.step(0.01, given)
        model.zero_grad()


def pieces(tensors: Mapping[str, Tensor], rows: RowMap, rank: int) -> dict[str, Tensor]:
    """Copies, by name, of the rows that a rank holds: all rows of a tensor that `rows` does not split."""
    own = {name: rows.of(name, rank) for name in tensors}
    return {name: tensor[own[name].start : own[name].stop].clone() for name, tensor in tensors.items()}
