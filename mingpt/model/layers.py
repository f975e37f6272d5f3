"""Norm, dropout and activations in up to three versions; layers without initial weights; positions.

On the CPU the functions of cpu_ops.py are used. Other devices and a compiler use torch's own operations,
except where the CPU's compiler generates slow code for them. The causal mask and the rotary tables depend on
the positions alone and are shared by all blocks. The tables are computed on the CPU and copied, so that they
have the same bits on every device.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.model import cpu_ops

ROTARY_BASE = 10_000.0


def use_torch_ops(x: Tensor) -> bool:
    """Return whether to use torch's own operations: under a compiler, and on any device but the CPU."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def compiling_for_cpu(x: Tensor) -> bool:
    """Return whether torch.compile traces the call for the CPU, where it does not fuse random draws."""
    return x.device.type == "cpu" and torch.compiler.is_compiling()


def rms_norm(x: Tensor) -> Tensor:
    """Return x over its root mean square along the last dimension (Zhang and Sennrich 2019), no weights."""
    return F.rms_norm(x, x.shape[-1:], eps=cpu_ops.EPSILON)


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) if use_torch_ops(x) else cpu_ops.rms_norm(x)


class Linear(nn.Linear):
    """nn.Linear without initial weights: `draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Draw nothing: on the meta device nn.Linear would import torch._dynamo for it."""


class Embedding(nn.Embedding):
    """nn.Embedding without initial weights: `draw_weight` draws them."""

    def reset_parameters(self) -> None:
        """Draw nothing, as in Linear above."""


class Dropout(nn.Module):
    """nn.Dropout; on a CPU the probability is rounded to a multiple of 1/256."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        probability = self.probability if self.training else 0.0
        if compiling_for_cpu(x):
            return compiled_dropout(x, probability)
        return F.dropout(x, probability) if use_torch_ops(x) else cpu_ops.dropout(x, probability)


def compiled_dropout(x: Tensor, probability: float) -> Tensor:
    """Compute `cpu_ops.dropout` by operations that torch.compile vectorises on the CPU, draws included."""
    if not probability:
        return x
    byte, factor = cpu_ops.dropout_threshold(probability)
    mask = cpu_ops.random_bytes(x.shape).float() >= byte  # as float: a comparison of bytes is not vectorised
    return x * mask.to(x.dtype) * factor


def gelu(x: Tensor) -> Tensor:
    """Return F.gelu(x, approximate="tanh")."""
    if compiling_for_cpu(x):  # one exponential instead of a hyperbolic tangent
        return x * torch.sigmoid(x * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * x * x))
    return F.gelu(x, approximate="tanh") if use_torch_ops(x) else cpu_ops.gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    """Return F.relu(x).square() (So et al. 2021)."""
    return F.relu(x).square() if use_torch_ops(x) else cpu_ops.squared_relu(x)


class Rotary(nn.Module):
    """Rotary position embedding: rotate pairs of features by angles proportional to the position."""

    def __init__(self, head_size: int, block_size: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(block_size, -(-head_size // 2)), persistent=False)
        self.register_buffer("sin", torch.empty(block_size, -(-head_size // 2)), persistent=False)
        self.cos: Tensor
        self.sin: Tensor
        self.head_size = head_size
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the tables; on the meta device there is nothing to compute."""
        if self.cos.is_meta:
            return
        with torch.device("cpu"):
            frequencies = ROTARY_BASE ** (-torch.arange(0, self.head_size, 2) / self.head_size)
            angles = torch.outer(torch.arange(len(self.cos)).float(), frequencies)  # (T, D / 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor, start: int) -> Tensor:
        """Rotate the (B, H, T, D) features of positions start, start + 1, ..."""
        end = start + x.size(2)
        cos, sin = (table[start:end].to(x.dtype) for table in (self.cos, self.sin))  # (T, D / 2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class Positions(nn.Module):
    """The causal mask and the rotary tables, which all blocks share.

    `mask` is (block_size, block_size), minus infinity above the diagonal, else 0. `rotary` is None if
    positions are learned.
    """

    def __init__(self, rotary: Rotary | None, block_size: int) -> None:
        super().__init__()
        self.rotary = rotary
        self.register_buffer("mask", torch.empty(block_size, block_size), persistent=False)
        self.mask: Tensor
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the mask and tables, as is needed again after Module.to_empty; not on the meta device."""
        if not self.mask.is_meta:
            self.mask.fill_(float("-inf")).triu_(1)
        if self.rotary:
            self.rotary.init_buffers()
