"""The operations of the model, each in up to three versions, and the choice among these versions.

`ops_for(x)` returns the object whose methods are the operations on x's device:

| | GPU | torch.compile for a CPU | CPU |
|---|---|---|---|
| RMSNorm, squared ReLU | torch's | torch's | own backward passes |
| GELU | torch's | by one exponential | by a table in bfloat16, else torch's |
| dropout | torch's | random bytes, vectorised | random bytes |
| attention | torch's fused kernel | products, up to MAX_MATH_ATTENTION tokens | likewise, without a cache |

torch's backward passes keep and read more intermediate results than those of `CPUOps`.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mingpt.base.errors import UserError

ROTARY_BASE = 10_000.0
EPSILON = 1e-6
# Up to this number of tokens plain products are faster than the CPU's flash-attention kernel, whose backward
# pass is slow.
MAX_MATH_ATTENTION = 512
ROWS = 128  # queries in one product of attention, which leaves out the keys after the last of these queries
CHUNK = 1 << 17  # elements of GELU that are looked up at a time: few enough for a core's cache
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
        """Rotate each pair of features (i, i + D / 2) by the angle of its position.

        `x` has the (B, H, T, D) queries or keys of positions `start`, `start` + 1, ...
        """
        end = start + x.size(2)
        cos, sin = (table[start:end].to(x.dtype) for table in (self.cos, self.sin))  # (T, D / 2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class PositionTables(nn.Module):
    """A module that keeps the tables of Positions as buffers; calling it returns the Positions.

    Blocks get the tables as tensors: FSDP2 marks modules, and torch.compile then makes other code. The tables
    are computed on the CPU and copied, so they have the same bits on every device. Raises UserError if D,
    `rotary_size`, is odd.
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
        """Append (B, H, T, D) keys and values; return all keys and values, each (B, H, length + T, D)."""
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


class TorchOps:
    """The operations of the model, computed by torch's own functions."""

    def rms_norm(self, x: Tensor) -> Tensor:
        """Return `rms_norm(x)`, which autocast makes float32 on a GPU, and of its own type in CPUOps."""
        return rms_norm(x)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def squared_relu(self, x: Tensor) -> Tensor:
        """Return max(x, 0)^2 (So et al. 2021)."""
        return F.relu(x).square()

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """Apply F.dropout; on a CPU a probability above 0 is rounded to n / 256, 0 < n < 256."""
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

        `mask` is the mask of Positions, `start` the number of cached positions.
        """
        # After a cached start there is one token, which attends to all positions.
        return F.scaled_dot_product_attention(query, key, value, is_causal=not start, dropout_p=dropout)


class CompiledCPUOps(TorchOps):
    """The operations for torch.compile on a CPU.

    The compiler makes faster code from these methods than from torch's own functions.
    """

    def gelu(self, x: Tensor) -> Tensor:  # one exponential instead of a hyperbolic tangent
        return x * torch.sigmoid(x * (2 * math.sqrt(2 / math.pi)) * (1 + 0.044715 * x * x))

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        if not probability:
            return x
        byte, factor = dropout_threshold(probability)
        mask = random_bytes(x.shape).float() >= byte  # as float: a comparison of bytes is not vectorised
        return x * mask.to(x.dtype) * factor

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, dropout: float, start: int
    ) -> Tensor:
        length = query.size(2)
        if length > MAX_MATH_ATTENTION:
            return super().attend(query, key, value, mask, dropout, start)
        scores = (query / math.sqrt(query.size(3))) @ key.mT + mask[:length, :length].to(query.dtype)
        return self.dropout(F.softmax(scores, dim=-1).to(value.dtype), dropout) @ value


class CPUOps(TorchOps):
    """The operations for a CPU without torch.compile, with few passes over memory."""

    def rms_norm(self, x: Tensor) -> Tensor:
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return _RMSNorm.apply(x, dtype)  # type: ignore[no-any-return]

    def gelu(self, x: Tensor) -> Tensor:
        """Return GELU with the tanh approximation, for bfloat16 from a table of all 65,536 values.

        torch's own kernel takes three times as long as the table.
        """
        if x.dtype != torch.bfloat16:
            return super().gelu(x)
        return _GELU.apply(x.contiguous())  # type: ignore[no-any-return]

    def squared_relu(self, x: Tensor) -> Tensor:
        return _SquaredReLU.apply(x)  # type: ignore[no-any-return]

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        if not probability:
            return x
        mask, factor = dropout_mask(x.shape, probability, x.dtype)
        return (x * mask).mul_(factor)

    def attention(
        self, qkv: Tensor, heads: int, positions: Positions, dropout: float, cache: KeyValues | None = None
    ) -> Tensor:
        length, dtype = qkv.size(1), qkv.dtype
        if cache or length > MAX_MATH_ATTENTION:
            return super().attention(qkv, heads, positions, dropout, cache)
        cos = sin = None
        if positions.are_rotary:
            tables = positions.cos, positions.sin
            cos, sin = (table[:length, None, None].to(dtype) for table in tables)  # (T, 1, 1, D / 2)
        with torch.autocast("cpu", enabled=False):
            y: Tensor = _Attention.apply(qkv, heads, positions.mask.to(dtype), cos, sin, dropout)
        return y


TORCH, COMPILED_CPU, CPU = TorchOps(), CompiledCPUOps(), CPUOps()


def ops_for(x: Tensor) -> TorchOps:
    """Return the operations for x's device; on a CPU, CompiledCPUOps while torch.compile traces the call."""
    if x.device.type != "cpu":
        return TORCH
    return COMPILED_CPU if torch.compiler.is_compiling() else CPU


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        scale = inverse_rms(x)
        y = torch.mul(x, scale, out=torch.empty(x.shape, dtype=dtype))
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        y, scale = ctx.saved_tensors
        return norm_backward(grad, y, scale).to(scale.dtype), None


def inverse_rms(x: Tensor) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + EPSILON) over the last dimension, kept with size 1; in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return square.div_(x.size(-1)).add_(EPSILON).rsqrt_()


def norm_backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient of x, given `grad`, the gradient of y = x * scale, where scale is 1 / rms(x)."""
    inner = (grad * y).mean(-1, keepdim=True, dtype=scale.dtype)
    return torch.addcmul(grad, y, inner, value=-1.0).mul(scale)


class _SquaredReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        positive = torch.relu(x)
        ctx.save_for_backward(positive)
        return positive * positive

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (positive,) = ctx.saved_tensors
        return (grad * positive).mul_(2.0)


class _GELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, slope = torch.empty_like(x), torch.empty_like(x)
        flat = (tensor.view(-1).split(CHUNK) for tensor in (x, y, slope))
        for part, *results in zip(*flat, strict=True):
            number = part.view(torch.uint16).to(torch.int32)
            for table, result in zip(gelu_tables(), results, strict=True):
                torch.index_select(table, 0, number, out=result.view(torch.int16))
        ctx.save_for_backward(slope)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grad * slope


@functools.cache
def gelu_tables() -> tuple[Tensor, Tensor]:
    """Return tables of GELU and its slope, indexed by bfloat16 bits: (65536,) bfloat16, viewed as int16."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
    y = F.gelu(numbers, approximate="tanh")
    slope = torch.ops.aten.gelu_backward(torch.ones_like(numbers), numbers, approximate="tanh")
    return y.bfloat16().view(torch.int16), slope.bfloat16().view(torch.int16)


def random_bytes(shape: torch.Size) -> Tensor:
    """Draw uniform uint8 numbers from torch's CPU generator, 20 times as fast as floats."""
    size = math.prod(shape)
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-size // 8),))
    return drawn.view(torch.uint8)[:size].view(shape)


def dropout_threshold(dropout: float) -> tuple[int, float]:
    """Return the smallest random byte that keeps an activation, and the factor that restores the mean."""
    byte = min(255, max(1, round(256 * dropout)))
    return byte, 256 / (256 - byte)


def dropout_mask(shape: torch.Size, dropout: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Draw a mask of ones and zeros in `dtype`; return the mask and the factor that restores the mean."""
    byte, factor = dropout_threshold(dropout)
    return torch.ge(random_bytes(shape), byte, out=torch.empty(shape, dtype=dtype)), factor


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        mask: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        dropout: float,
    ) -> Tensor:
        batch, length, width = qkv.size(0), qkv.size(1), qkv.size(2) // 3
        size = width // heads
        parts = qkv.view(batch, length, 3, heads, size)
        # (3, B, H, T, D) for the products; `seen` is a view of it in the order of the input, (B, T, 3, H, D).
        stored = qkv.new_empty(3, batch, heads, length, size)
        seen = stored.permute(1, 3, 0, 2, 4)
        if cos is None or sin is None:
            seen.copy_(parts)
            normed = scale = None
        else:
            scale = inverse_rms(parts[:, :, :2])
            normed = torch.mul(parts[:, :, :2], scale, out=qkv.new_empty(batch, length, 2, heads, size))
            rotate(normed, cos, sin, seen[:, :, :2])
            seen[:, :, 2].copy_(parts[:, :, 2])
        stored[0].mul_(1.0 / math.sqrt(size))
        query, key, value = stored.flatten(1, 2).unbind(0)  # (B H, T, D)
        y, saved, ctx.factor = torch.empty_like(query), list[Tensor | None](), 1.0
        for first, last in row_ranges(length):
            # (B H, rows, last)
            scores = torch.baddbmm(mask[first:last, :last], query[:, first:last], key[:, :last].mT)
            kept = weights = torch.softmax(scores, -1)
            keep = None
            if dropout:
                keep, ctx.factor = dropout_mask(weights.shape, dropout, weights.dtype)
                kept = weights * keep
            y[:, first:last] = torch.bmm(kept, value[:, :last])
            saved += [weights, keep]
        if dropout:
            y.mul_(ctx.factor)
        ctx.save_for_backward(query, key, value, cos, sin, normed, scale, *saved)
        return y.view(batch, heads, length, size).transpose(1, 2).reshape(batch, length, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cos, sin, normed, scale, *saved = ctx.saved_tensors
        batch, length, width = grad.shape
        size = query.size(-1)
        heads = width // size
        grad = grad.view(batch, length, heads, size).transpose(1, 2).reshape(batch * heads, length, size)
        if ctx.factor > 1.0:
            grad = grad * ctx.factor
        stored = grad.new_zeros(3, batch * heads, length, size)
        d_query, d_key, d_value = stored.unbind(0)
        for (first, last), weights, keep in zip(row_ranges(length), saved[::2], saved[1::2], strict=True):
            kept, part = weights, grad[:, first:last]
            d_weights = torch.bmm(part, value[:, :last].mT)
            if keep is not None:
                d_weights.mul_(keep)
                kept = weights * keep
            d_value[:, :last] += torch.bmm(kept.mT, part)
            d_scores = torch.ops.aten._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            d_query[:, first:last] = torch.bmm(d_scores, key[:, :last])
            d_key[:, :last] += torch.bmm(d_scores.mT, query[:, first:last])
        d_query.mul_(1.0 / math.sqrt(size))
        seen = stored.view(3, batch, heads, length, size).permute(1, 3, 0, 2, 4)  # (B, T, 3, H, D)
        d_qkv = grad.new_empty(batch, length, 3, heads, size)
        if cos is None:
            d_qkv.copy_(seen)
        else:
            turned = rotate(seen[:, :, :2], cos, -sin, grad.new_empty(batch, length, 2, heads, size))
            d_qkv[:, :, :2] = norm_backward(turned, normed, scale)
            d_qkv[:, :, 2] = seen[:, :, 2]
        return d_qkv.view(batch, length, 3 * width), None, None, None, None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotate pairs (i, i + D / 2) of x's last dimension into `out`, not x; return `out`. -sin turns back."""
    half = x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    out_first, out_second = out[..., :half], out[..., half:]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def row_ranges(length: int) -> list[tuple[int, int]]:
    """Split `length` queries into blocks of at most ROWS; return (first query, last + 1) of each block."""
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]


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
