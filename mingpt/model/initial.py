"""Initial weights, each from a random stream of its own: a worker can draw them one by one."""

import hashlib
import math

import torch
from torch import Tensor

from mingpt.config import ModelConfig


def draw_weight(name: str, shape: tuple[int, ...], config: ModelConfig, seed: int) -> Tensor:
    """The initial value of a parameter of GPT, float32 on the CPU, by the table in gpt.py.

    It depends on the arguments alone, whatever the device, the number of threads, and the other parameters.
    """
    is_projection = name.endswith("c_proj.weight")
    weight = torch.zeros(shape, dtype=torch.float32, device="cpu")
    if name.endswith("bias"):
        return weight
    if "ln_" in name:
        return weight.fill_(1.0)
    if config.arch == "gpt2":
        std = 0.02 / math.sqrt(2 * config.n_layer) if is_projection else 0.02
    elif is_projection or name == "lm_head.weight":
        return weight
    else:
        std = 1.0 if name == "wte.weight" else shape[1] ** -0.5
    generator = torch.Generator(device="cpu").manual_seed(stream_seed(seed, name))
    return weight.normal_(std=std, generator=generator)


def stream_seed(seed: int, name: str) -> int:
    """64 bits that depend on both."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
