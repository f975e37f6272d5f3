"""GPT, in two architectures of the same shape.

| | `gpt2` (Radford et al. 2019) | `modern` |
|---|---|---|
| positions | learned, added (`wpe`) | rotary, on queries and keys (Su et al. 2021) |
| normalisation | LayerNorm with weight and bias | RMSNorm without parameters (Zhang and Sennrich 2019), on queries and keys too |
| MLP | 4 x, tanh-approximated GELU | 4 x, squared ReLU (So et al. 2021) |
| biases | everywhere | nowhere |
| head | tied to `wte` | its own matrix |
| initial weights | N(0, 0.02); `c_proj` N(0, 0.02 / sqrt(2 n_layer)) | N(0, 1 / fan_in); every `c_proj` and the head zero; `wte` N(0, 1) |

B is the batch, T the length of the input, C = n_embd, H = n_head, D = C / H, V = vocab_size.
"""

import math
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt import kernels, loss
from mingpt.config import ModelConfig

ROTARY_BASE = 10_000.0
WRITTEN_OUT_UP_TO = 512  # tokens up to which plain products beat the CPU's flash-attention kernel, whose backward pass is slow


class KeyValues(Protocol):
    """Keys and values of the positions before the input, per block; see generate.Cache."""

    length: int

    def extend(self, block: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (B, H, T, D) keys and values of the new positions; returns those of all positions so far."""


def rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=kernels.EPSILON)


class RMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x) if plain(x) else kernels.rms_norm(x)


class Dropout(nn.Module):
    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        probability = self.probability if self.training else 0.0
        if for_cpu_compiler(x):
            return masked(x, probability)
        return F.dropout(x, probability) if plain(x) else kernels.dropout(x, probability)


def plain(x: Tensor) -> bool:
    """Whether to write it as anybody would: for a compiler, and on every device but the CPU."""
    return x.device.type != "cpu" or torch.compiler.is_compiling()


def for_cpu_compiler(x: Tensor) -> bool:
    """Whether a compiler writes it for the CPU, whose passes over memory it fuses: then what it cannot look into is the dear part."""
    return x.device.type == "cpu" and torch.compiler.is_compiling()


def masked(x: Tensor, dropout: float) -> Tensor:
    """F.dropout for a compiler that would draw one number at a time."""
    if not dropout:
        return x
    byte, factor = kernels.threshold(dropout)
    mask = kernels.random_bytes(x.shape).float() >= byte  # as float: a comparison of bytes is not vectorised
    return x * mask.to(x.dtype) * factor


def gelu(x: Tensor) -> Tensor:
    """F.gelu(x, approximate="tanh")"""
    if for_cpu_compiler(x):
        return x * torch.sigmoid(x * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * x * x))  # one exponential instead of a hyperbolic tangent
    return F.gelu(x, approximate="tanh")


class Rotary(nn.Module):
    """Rotate pairs of features by angles that grow with the position; scores then depend on distances alone."""

    def __init__(self, head_size: int, block_size: int) -> None:
        super().__init__()
        frequencies = ROTARY_BASE ** (-torch.arange(0, head_size, 2) / head_size)
        angles = torch.outer(torch.arange(block_size).float(), frequencies)  # (T, D / 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, x: Tensor, start: int) -> Tensor:
        """(B, H, T, D) features of positions start, start + 1, ..., rotated."""
        cos, sin = (table[start : start + x.size(2)].to(x.dtype) for table in (self.cos, self.sin))  # (T, D / 2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class CausalSelfAttention(nn.Module):
    """Every position looks at itself and those before it, never ahead."""

    def __init__(self, config: ModelConfig, block_size: int) -> None:
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        bias = config.arch == "gpt2"
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=bias)
        self.resid_dropout = Dropout(config.dropout)
        self.rotary = Rotary(config.n_embd // config.n_head, block_size) if config.arch == "modern" else None
        self.register_buffer("mask", torch.full((block_size, block_size), float("-inf")).triu(1), persistent=False)
        self.mask: Tensor

    def forward(self, x: Tensor, block: int, cache: KeyValues | None = None) -> Tensor:
        batch, length, width = x.shape
        qkv = self.c_attn(x)  # (B, T, 3 C)
        if cache or plain(x) or length > WRITTEN_OUT_UP_TO:
            y = self.attend(qkv.view(batch, length, 3, self.n_head, -1), block, cache).reshape(batch, length, width)
        else:
            cos, sin = (self.rotary.cos, self.rotary.sin) if self.rotary else (None, None)
            y = kernels.attention(qkv, self.n_head, self.mask, cos, sin, self.dropout if self.training else 0.0)
        return self.resid_dropout(self.c_proj(y))

    def attend(self, qkv: Tensor, block: int, cache: KeyValues | None) -> Tensor:
        """(B, T, 3, H, D) to (B, T, H, D)."""
        start = cache.length if cache else 0
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
        if self.rotary:
            query, key = (self.rotary(rms_norm(part), start) for part in (query, key))
        if cache:
            key, value = cache.extend(block, key, value)
        mask = self.mask[start : start + query.size(2), : key.size(2)].to(query.dtype)  # (T, positions so far)
        dropout = self.dropout if self.training else 0.0
        if for_cpu_compiler(query) and query.size(2) <= WRITTEN_OUT_UP_TO:
            scores = (query / math.sqrt(query.size(3))) @ key.mT + mask
            return (masked(F.softmax(scores, dim=-1).to(value.dtype), dropout) @ value).transpose(1, 2)
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask if start else None, is_causal=not start, dropout_p=dropout)
        return y.transpose(1, 2)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.arch == "gpt2"
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=bias)
        self.dropout = Dropout(config.dropout)
        self.gelu = config.arch == "gpt2"

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)  # (B, T, 4 C)
        return self.dropout(self.c_proj(self.activate(x)))

    def activate(self, x: Tensor) -> Tensor:
        if self.gelu:
            return gelu(x)
        return F.relu(x).square() if plain(x) else kernels.squared_relu(x)


class Block(nn.Module):
    def __init__(self, config: ModelConfig, block_size: int) -> None:
        super().__init__()
        self.ln_1 = norm(config)
        self.attn = CausalSelfAttention(config, block_size)
        self.ln_2 = norm(config)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, block: int, cache: KeyValues | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), block, cache)
        return x + self.mlp(self.ln_2(x))


def norm(config: ModelConfig) -> nn.Module:
    return nn.LayerNorm(config.n_embd) if config.arch == "gpt2" else RMSNorm()


class GPT(nn.Module):
    """A decoder-only transformer over `vocab_size` tokens and up to `block_size` positions."""

    def __init__(self, config: ModelConfig, *, vocab_size: int, block_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size, self.block_size = config, vocab_size, block_size
        self.wte = nn.Embedding(vocab_size, config.n_embd)
        self.wpe = nn.Embedding(block_size, config.n_embd) if config.arch == "gpt2" else None
        self.drop = Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config, block_size) for _ in range(config.n_layer))
        self.ln_f = norm(config)
        self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        if config.arch == "gpt2":
            self.lm_head.weight = self.wte.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """The last row of the table at the top, from torch's global generator."""
        gpt2 = self.config.arch == "gpt2"
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                weight.zero_()
            elif "ln_" in name:
                weight.fill_(1.0)
            elif gpt2:
                weight.normal_(std=0.02 / math.sqrt(2 * self.config.n_layer) if name.endswith("c_proj.weight") else 0.02)
            elif name.endswith("c_proj.weight") or name == "lm_head.weight":
                weight.zero_()
            else:
                weight.normal_(std=1.0 if name == "wte.weight" else weight.size(1) ** -0.5)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, cache: KeyValues | None = None) -> tuple[Tensor | None, Tensor | None]:
        """(B, T) tokens to (B, T, V) logits and, given (B, T) targets, the mean loss in nats per token.

        Logits are None beside a loss if they are more than loss.AT_ONCE: then they are never all there.
        With a cache the input goes on behind the positions stored there.
        """
        start = cache.length if cache else 0
        if start + tokens.size(1) > self.block_size:
            raise ValueError(f"{start + tokens.size(1)} tokens do not fit in block_size {self.block_size}")
        x = self.wte(tokens)  # (B, T, C)
        x = x + self.wpe.weight[start : start + tokens.size(1)] if self.wpe else rms_norm(x)
        x = self.drop(x)
        for number, block in enumerate(self.h):
            x = block(x, number, cache)
        x, weight = self.ln_f(x), self.lm_head.weight
        if targets is not None and loss.too_many(x, weight):
            return None, loss.chunked_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
        logits = loss.logits(x, weight)  # (B, T, V)
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def flops_per_token(self) -> float:
        """Multiplications and additions of one forward and backward pass per token (Chowdhery et al. 2022, appendix B)."""
        matrices = sum(weight.numel() for name, weight in self.named_parameters() if weight.ndim == 2 and name not in ("wte.weight", "wpe.weight"))
        head = self.wte.weight.numel() if self.config.arch == "gpt2" else 0  # tied: listed once, as wte
        return 6.0 * (matrices + head) + 12.0 * self.config.n_layer * self.config.n_embd * self.block_size


class Loss(nn.Module):
    """What is trained: the mean loss alone, so that nobody keeps the logits or asks for their gradient."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T) tokens and targets to the loss in nats per token."""
        loss: Tensor = self.model(tokens, targets)[1]
        return loss
