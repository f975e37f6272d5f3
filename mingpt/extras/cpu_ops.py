"""The model's operations on a CPU, in two versions: for torch.compile, and without it.

`cpu_operations()`, which mingpt/model/operations.py calls, returns the object with the operations:

| | torch's own | for torch.compile | without it |
|---|---|---|---|
| RMSNorm, squared ReLU | torch's | torch's | own backward passes |
| GELU | torch's | by one exponential | by a table in bfloat16, else torch's |
| dropout | torch's | random bytes, vectorised | random bytes |
| attention | torch's fused kernel | products, up to MAX_MATH_ATTENTION tokens | likewise, without a cache |

Without torch.compile, attention in float32 with neither dropout nor rotary positions is torch's, which is
faster there. torch's backward passes keep and read more intermediate results than those of `CPUOps`. A
dropout probability above 0 is rounded to n / 256, 0 < n < 256.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt.model.operations import EPSILON, KeyValues, Operations, Positions

# Up to this number of tokens plain products are faster than the CPU's flash-attention kernel, whose backward
# pass is slow.
MAX_MATH_ATTENTION = 512
ROWS = 128  # queries in one product of attention, which leaves out the keys after the last of these queries
CHUNK = 1 << 17  # elements of GELU that are looked up at a time: few enough for a core's cache


class CompiledCPUOps(Operations):
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


class CPUOps(Operations):
    """The operations for a CPU without torch.compile, with few passes over memory."""

    def rms_norm(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + EPSILON) over the last dimension; under autocast in autocast's type."""
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        return _RMSNorm.apply(x, dtype)  # type: ignore[no-any-return]

    def gelu(self, x: Tensor) -> Tensor:
        """Return GELU with the tanh approximation, for bfloat16 from a table of all 65,536 values."""
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
        is_plain = dtype == torch.float32 and not dropout and not positions.are_rotary
        if cache or length > MAX_MATH_ATTENTION or is_plain:
            return super().attention(qkv, heads, positions, dropout, cache)
        cos = sin = None
        if positions.are_rotary:
            tables = positions.cos, positions.sin
            cos, sin = (table[:length, None, None].to(dtype) for table in tables)  # (T, 1, 1, D / 2)
        with torch.autocast("cpu", enabled=False):
            y: Tensor = _Attention.apply(qkv, heads, positions.mask.to(dtype), cos, sin, dropout)
        return y


COMPILED_CPU, CPU = CompiledCPUOps(), CPUOps()


def cpu_operations() -> Operations:
    """Return the operations for a CPU: CompiledCPUOps while torch.compile traces the call, else CPUOps."""
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
    """Draw uniform uint8 numbers from torch's CPU generator; floats would take 20 times as long."""
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
    """Rotate each pair (i, i + size / 2) of x's last dimension into `out`, not in place; return `out`."""
    half = x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    out_first, out_second = out[..., :half], out[..., half:]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


def row_ranges(length: int) -> list[tuple[int, int]]:
    """Split `length` queries into blocks of at most ROWS; return (first query, last + 1) of each block."""
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]
