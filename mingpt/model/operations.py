"""The operations of the model, by torch's own functions, and a table of operations for kinds of devices.

`ops_for(x)` returns the object whose methods are the operations on x's device. OPERATIONS says which object;
if it has no entry for this kind of device, or the entry's module is missing, the object is an Operations. To
add operations for another kind, write a subclass in a module of its own, and enter that in OPERATIONS.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.base.errors import UserError
from mingpt.base.extras import load_extra

ROTARY_BASE = 10_000.0
EPSILON = 1e-6
MAX_LOGITS = 1 << 26  # logits that exist at once, unless ROW_MULTIPLE rows have more
ROW_MULTIPLE = 128
VOCAB_MULTIPLE = 64  # rows of the head are padded to this multiple on a GPU, for its tensor cores


@dataclass(frozen=True)
class Positions:
    """The causal mask and the tables of rotary positions (Su et al. 2021), which all blocks share.

    `mask` is (block_size, block_size), minus infinity above the diagonal, else 0. `cos` and `sin` are
    (block_size, D / 2), where D is the size of a head, or 0 if positions are learned.
    """

    mask: Tensor
    cos: Tensor
    sin: Tensor

    @property
    def are_rotary(self) -> bool:
        return self.cos.numel() > 0

    def rotate(self, x: Tensor, start: int) -> Tensor:
        """Rotate each pair of features (i, i + D / 2) by the tables' angle for i and the token's position.

        `x` has the (B, H, T, D) queries or keys of positions `start`, `start` + 1, ...
        """
        end = start + x.size(2)
        cos, sin = (table[start:end].to(x.dtype) for table in (self.cos, self.sin))  # (T, D / 2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class PositionTables(nn.Module):
    """A module that keeps the tables of Positions as buffers; calling it returns the Positions.

    Blocks get tensors instead of this module, because torch.compile makes other code for a module that FSDP2
    has marked. `cos` and `sin` are computed on the CPU, also for other devices. `rotary_size` is D, or 0 if
    positions are learned. Raises UserError if `rotary_size` is odd.
    """

    def __init__(self, block_size: int, rotary_size: int = 0) -> None:
        super().__init__()
        if rotary_size % 2:
            raise UserError(f"model.n_embd / model.n_head ({rotary_size}) must be even for rotary positions")
        self.rotary_size = rotary_size
        for name, columns in (("mask", block_size), ("cos", rotary_size // 2), ("sin", rotary_size // 2)):
            self.register_buffer(name, torch.empty(block_size, columns), persistent=False)
        self.mask: Tensor
        self.cos: Tensor
        self.sin: Tensor
        self.init_buffers()

    def init_buffers(self) -> None:
        """Compute the mask and the tables; call this after Module.to_empty. Skipped on the meta device."""
        if self.mask.is_meta:
            return
        self.mask.fill_(float("-inf")).triu_(1)
        with torch.device("cpu"):
            frequencies = ROTARY_BASE ** (-torch.arange(0, self.rotary_size, 2) / self.rotary_size)
            angles = torch.outer(torch.arange(len(self.cos)).float(), frequencies)  # (T, D / 2)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        # Import the operations now: an import while torch.compile traces a call breaks the graph.
        ops_for(self.mask)

    def forward(self) -> Positions:
        return Positions(self.mask, self.cos, self.sin)


class KeyValues:
    """The key/value cache of one block: keys and values of the first `length` of `block_size` positions.

    Memory is allocated when the first keys are appended; the cache has the dtype of these keys.
    """

    stored: Tensor  # (2, B, H, block_size, D)

    def __init__(self, block_size: int) -> None:
        self.block_size, self.length = block_size, 0

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append (B, H, T, D) keys and values; return all keys and values, each (B, H, length + T, D).

        T must be 1 unless the cache is empty. In the result's shape, `length` is that before the call.
        """
        assert not self.length or key.size(2) == 1, "several tokens would see those after them"
        if not self.length:
            self.stored = key.new_empty(2, *key.shape[:2], self.block_size, key.size(3))
        start, self.length = self.length, self.length + key.size(2)
        self.stored[:, :, :, start : self.length] = torch.stack((key, value))
        keys, values = self.stored[:, :, :, : self.length]
        return keys, values


def rms_norm(x: Tensor) -> Tensor:
    """Divide x by its root mean square along the last dimension: RMSNorm (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, x.shape[-1:], eps=EPSILON)


class Operations:
    """The operations of the model, computed by torch's own functions; subclasses compute them otherwise."""

    def rms_norm(self, x: Tensor) -> Tensor:
        """Return `rms_norm(x)`; under autocast torch chooses the result's type, such as float32 on a GPU."""
        return rms_norm(x)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def squared_relu(self, x: Tensor) -> Tensor:
        """Return max(x, 0)^2 (So et al. 2021)."""
        return F.relu(x).square()

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """Apply F.dropout; a subclass may round `probability`."""
        return F.dropout(x, probability)

    def attention(
        self, qkv: Tensor, heads: int, positions: Positions, dropout: float, cache: KeyValues | None = None
    ) -> Tensor:
        """Compute causal self-attention, softmax(q k^T / sqrt(D)) v, with dropout after the softmax.

        `qkv` has the queries, keys and values, (B, T, 3 C); the result is (B, T, C). With rotary positions,
        queries and keys are first divided by their root mean square and rotated. With a cache, keys and
        values are appended to the cache, and the queries also attend to the earlier keys in the cache.
        """
        batch, length, width = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        start = cache.length if cache else 0
        split = qkv.view(batch, length, 3, heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)  # (B, H, T, D)
        if positions.are_rotary:
            query, key = (positions.rotate(rms_norm(part), start) for part in (query, key))
        if cache:
            key, value = cache.extend(key, value)
        y = self.attend(query, key, value, positions.mask, dropout, start)
        return y.transpose(1, 2).reshape(batch, length, width)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, start: int
    ) -> Tensor:
        """Attend from (B, H, T, D) queries to (B, H, start + T, D) keys and values; return (B, H, T, D).

        Attention is causal. `mask` is the mask of Positions, `dropout` a probability, and `start` the number
        of cached positions; if `start` is not 0, T must be 1.
        """
        # After a cached start there is one token, which attends to all positions.
        return F.scaled_dot_product_attention(query, key, value, is_causal=not start, dropout_p=dropout)


# {kind of device: a subclass of Operations, or a function that returns an instance of one, as "module:name"}.
# A kind of device that is not here, or whose module is not there, has torch's own functions.
OPERATIONS = {"cpu": "mingpt.extras.cpu_ops:cpu_operations"}
loaded: dict[str, Callable[[], Operations]] = {}  # {kind of device: what is called for its operations}


def ops_for(x: Tensor) -> Operations:
    """Return the operations for x's device. The first call for a kind of device imports its entry, if any."""
    kind = x.device.type
    if kind not in loaded:
        extra = load_extra(OPERATIONS[kind]) if kind in OPERATIONS else None
        loaded[kind] = extra or Operations
    return loaded[kind]()


def padding(weight: Tensor) -> int:
    """Return how many rows pad a (V, C) head to a multiple of VOCAB_MULTIPLE; 0 if not on a GPU."""
    return -weight.size(0) % VOCAB_MULTIPLE if weight.is_cuda else 0


def head_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the logits, (..., V), of features, (..., C), for a head whose weight is `weight`, (V, C)."""
    missing = padding(weight)
    if not missing:
        return F.linear(x, weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., : weight.size(0)]


def head_loss(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
    """Return (logits, F.cross_entropy in nats) of (B, T, C) features, a (V, C) head and (B, T) targets.

    The logits, (B, T, V), have no gradient. If there would be more than MAX_LOGITS logits, the loss is
    computed in chunks, and None is returned instead of the logits. Each chunk's part of the gradient is
    computed in the forward pass, so no logits are kept (compare Hsu et al. 2024, "Liger Kernel").
    """
    if targets.numel() * weight.size(0) > MAX_LOGITS:
        return None, chunked_cross_entropy(x.flatten(0, 1), weight, targets.flatten())
    logits = head_logits(x, weight)
    # FSDP2 puts a hook on each output with a gradient, and warns of a view such as the GPU's logits.
    return logits.detach(), F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return F.cross_entropy(F.linear(x, weight), targets), a float32 scalar, for (N, C), (V, C) and (N,)."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(x, weight, targets, dtype, needs_grad)
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, needs_grad: bool
    ) -> Tensor:
        rows, vocab_size = x.size(0), weight.size(0)
        features, head = x.to(dtype), F.pad(weight.to(dtype), (0, 0, 0, padding(weight)))
        columns = torch.arange(head.size(0), device=x.device)
        size = max(ROW_MULTIPLE, MAX_LOGITS // vocab_size // ROW_MULTIPLE * ROW_MULTIPLE)
        # If divided by `rows` here, most gradients would be 0 in float16: `backward` divides by `boost`.
        ctx.boost = float(1 << rows.bit_length()) if dtype == torch.float16 else 1.0
        total = x.new_zeros((), dtype=torch.float32)
        d_x, d_head = [], torch.zeros_like(head, dtype=torch.float32) if needs_grad else None
        for part, target in zip(features.split(size), targets.split(size), strict=True):
            scores = (part @ head.T).float().masked_fill(columns >= vocab_size, float("-inf"))
            norm = scores.logsumexp(-1, keepdim=True)
            total = total + (norm - scores.gather(1, target.unsqueeze(1))).sum()
            if d_head is not None:
                softmax = torch.exp(scores - norm)
                d_scores = softmax - (columns == target.unsqueeze(1)).float()
                d_scores = (d_scores / (rows / ctx.boost)).to(dtype)
                d_x.append(d_scores @ head)
                d_head += d_scores.T @ part
        if d_head is not None:
            ctx.save_for_backward(torch.cat(d_x).to(x.dtype), d_head[:vocab_size].to(weight.dtype))
        return total / rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        grad = grad / ctx.boost
        return d_x * grad, d_weight * grad, None, None, None
