"""Norm, activation, dropout and attention for the CPU, with few passes over memory.

Each function computes the expression in its docstring. Its backward pass is written out: autograd's would
read every intermediate once more, keep more of them, and copy between the layouts of consecutive products. On
one core this saves a ninth of the time of a micro-batch of the default run. Other devices have fused kernels
and do not use this file.
"""

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 128  # queries in one product; keys later than all of them are left out
EPSILON = 1e-6
CHUNK = 1 << 17  # elements that are looked up at a time, so that their numbers stay in a core's cache


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
    """Return 1 / sqrt(mean(x^2) + EPSILON) over the last dimension, kept as size 1; in float32 or wider."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=dtype).square_()
    return square.div_(x.size(-1)).add_(EPSILON).rsqrt_()


def norm_backward(grad: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    """Return the gradient for x, given the gradient `grad` for y = x * scale, where scale is 1 / rms(x)."""
    inner = (grad * y).mean(-1, keepdim=True, dtype=scale.dtype)
    return torch.addcmul(grad, y, inner, value=-1.0).mul(scale)


def rms_norm(x: Tensor) -> Tensor:
    """Return F.rms_norm(x, x.shape[-1:], eps=EPSILON), in autocast's type if it is on, else in x's type."""
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
    return _RMSNorm.apply(x, dtype)  # type: ignore[no-any-return]


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


def squared_relu(x: Tensor) -> Tensor:
    """Return F.relu(x).square()."""
    return _SquaredReLU.apply(x)  # type: ignore[no-any-return]


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
    """Return GELU and its slope by the bits of a bfloat16 number: tables of (65536,) bfloat16 as int16."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).double()
    y = F.gelu(numbers, approximate="tanh")
    slope = torch.ops.aten.gelu_backward(torch.ones_like(numbers), numbers, approximate="tanh")
    return y.bfloat16().view(torch.int16), slope.bfloat16().view(torch.int16)


def gelu(x: Tensor) -> Tensor:
    """Return F.gelu(x, approximate="tanh").

    In bfloat16 there are 65,536 numbers, so value and slope are looked up. torch's own kernel computes a
    hyperbolic tangent for each element in each pass, and takes three times as long.
    """
    if x.dtype != torch.bfloat16:
        return F.gelu(x, approximate="tanh")
    return _GELU.apply(x.contiguous())  # type: ignore[no-any-return]


def random_bytes(shape: torch.Size) -> Tensor:
    """Draw uniform uint8 numbers from torch's CPU generator, in a twentieth of the time of as many floats."""
    size = math.prod(shape)
    drawn = torch.randint(-(2**63), 2**63 - 1, (-(-size // 8),))
    return drawn.view(torch.uint8)[:size].view(shape)


def dropout_threshold(dropout: float) -> tuple[int, float]:
    """Return the smallest random byte that keeps an activation, and the factor that restores the mean."""
    byte = min(255, max(1, round(256 * dropout)))
    return byte, 256 / (256 - byte)


def dropout_mask(shape: torch.Size, dropout: float, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Draw a mask of ones and zeros of `dtype`; return the mask and the factor that restores the mean."""
    byte, factor = dropout_threshold(dropout)
    return torch.ge(random_bytes(shape), byte, out=torch.empty(shape, dtype=dtype)), factor


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dropout: float) -> Tensor:
        mask, ctx.factor = dropout_mask(x.shape, dropout, x.dtype)
        ctx.save_for_backward(mask)
        return (x * mask).mul_(ctx.factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return (grad * mask).mul_(ctx.factor), None


def dropout(x: Tensor, probability: float) -> Tensor:
    """Return F.dropout(x, probability), with a probability above 0 rounded to n / 256, 0 < n < 256."""
    return _Dropout.apply(x, probability) if probability else x  # type: ignore[no-any-return]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Rotate the pairs (i, i + D / 2) of x's last dimension D into `out`, not x itself; -sin inverts this."""
    half = x.size(-1) // 2
    first, second = x[..., :half], x[..., half:]
    out_first, out_second = out[..., :half], out[..., half:]
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1.0)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


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
        y = torch.empty_like(query)
        ctx.factor, all_weights, masks = 1.0, [], []
        for first, last in row_ranges(length):
            # (B H, rows, last)
            scores = torch.baddbmm(mask[first:last, :last], query[:, first:last], key[:, :last].mT)
            weights = torch.softmax(scores, -1)
            if dropout:
                keep, ctx.factor = dropout_mask(weights.shape, dropout, weights.dtype)
                masks.append(keep)
                y[:, first:last] = torch.bmm(weights * keep, value[:, :last])
            else:
                y[:, first:last] = torch.bmm(weights, value[:, :last])
            all_weights.append(weights)
        if dropout:
            y.mul_(ctx.factor)
        ctx.save_for_backward(query, key, value, cos, sin, normed, scale, *all_weights, *masks)
        return y.view(batch, heads, length, size).transpose(1, 2).reshape(batch, length, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, cos, sin, normed, scale, *others = ctx.saved_tensors
        batch, length, width = grad.shape
        size = query.size(-1)
        heads = width // size
        grad = grad.view(batch, length, heads, size).transpose(1, 2).reshape(batch * heads, length, size)
        ranges = row_ranges(length)
        all_weights, masks = others[: len(ranges)], others[len(ranges) :]
        if masks:
            grad = grad * ctx.factor
        stored = grad.new_zeros(3, batch * heads, length, size)
        d_query, d_key, d_value = stored.unbind(0)
        for number, (first, last) in enumerate(ranges):
            weights, part = all_weights[number], grad[:, first:last]
            d_weights = torch.bmm(part, value[:, :last].mT)
            if masks:
                d_weights.mul_(masks[number])
                d_value[:, :last] += torch.bmm((weights * masks[number]).mT, part)
            else:
                d_value[:, :last] += torch.bmm(weights.mT, part)
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


def row_ranges(length: int) -> list[tuple[int, int]]:
    """Split `length` queries into blocks, of at most ROWS, for products; return each (first, last + 1)."""
    return [(first, min(first + ROWS, length)) for first in range(0, length, ROWS)]


def attention(
    qkv: Tensor, heads: int, mask: Tensor, cos: Tensor | None, sin: Tensor | None, dropout: float
) -> Tensor:
    """Compute causal self-attention, softmax(q k^T / sqrt(D) + mask) v.

    `qkv` has (B, T, 3 C) queries, keys and values; the result is (B, T, C). `mask` is (T, T) or
    larger, minus infinity above the diagonal. Given (T, D / 2) or longer cosines and sines, queries and keys
    are first divided by their root mean square and rotated. `dropout` is the probability for the softmax,
    rounded as by the function `dropout`.
    """
    if cos is not None and sin is not None:
        # (T, 1, 1, D / 2)
        cos, sin = (table[: qkv.size(1), None, None].to(qkv.dtype) for table in (cos, sin))
    with torch.autocast("cpu", enabled=False):
        y: Tensor = _Attention.apply(qkv, heads, mask.to(qkv.dtype), cos, sin, dropout)
    return y
