"""Norm, dropout and activation, each written three ways, and layers whose weights are drawn elsewhere.

On the CPU they are the functions of cpu_ops.py. For every other device and for a compiler they are torch's
own operations, except where the CPU's compiler generates slow code for those.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.model import cpu_ops


def use_torch_ops(x: Tensor) -> bool:
    """Whether to compute with torch's own operations: under a compiler, and on every device but the CPU."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def compiling_for_cpu(x: Tensor) -> bool:
    """Whether a compiler traces this for the CPU: it fuses passes over memory, but not random draws."""
    return x.device.type == "cpu" and torch.compiler.is_compiling()


def rms_norm(x: Tensor) -> Tensor:
    """x over its root mean square along the last dimension (Zhang and Sennrich 2019), without weights."""
    return F.rms_norm(x, x.shape[-1:], eps=cpu_ops.EPSILON)


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) if use_torch_ops(x) else cpu_ops.rms_norm(x)


class Linear(nn.Linear):
    """nn.Linear with weights that are still to be drawn."""

    def reset_parameters(self) -> None:
        """Draws nothing: on the meta device nn.Linear would import torch._dynamo for it."""


class Embedding(nn.Embedding):
    """nn.Embedding with weights that are still to be drawn."""

    def reset_parameters(self) -> None:
        """Draws nothing, as Linear."""


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
    """F.dropout for the CPU's compiler, which would draw one number at a time."""
    if not probability:
        return x
    byte, factor = cpu_ops.dropout_threshold(probability)
    mask = cpu_ops.random_bytes(x.shape).float() >= byte  # as float: a comparison of bytes is not vectorised
    return x * mask.to(x.dtype) * factor


def gelu(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh")"""
    if compiling_for_cpu(x):  # one exponential instead of a hyperbolic tangent
        return x * torch.sigmoid(x * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * x * x))
    return F.gelu(x, approximate="tanh") if use_torch_ops(x) else cpu_ops.gelu(x)


def squared_relu(x: Tensor) -> Tensor:
    """F.relu(x).square() (So et al. 2021)"""
    return F.relu(x).square() if use_torch_ops(x) else cpu_ops.squared_relu(x)
