"""The head and its loss: cross-entropy over the vocabulary, a few rows at a time where the vocabulary is large.

GPT-2's 50,257 logits for each of 16 x 1,024 tokens are 3.3 GB in float32, and as much again for their gradient. Here no more than AT_ONCE of
them exist at a time: a chunk's part of the gradient is computed as soon as its logits are, as the loss is known to be a mean. No product is
made twice (compare Hsu et al. 2024, "Liger Kernel").

On a GPU the vocabulary is padded to a multiple of PADDED_TO, which its matrix units want; in the product alone, so that parameters,
snapshots and results know nothing of it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

AT_ONCE = 1 << 26  # logits
PADDED_TO = 64
ROWS = 128  # chunks are a multiple of so many rows


def padding(weight: Tensor) -> int:
    """Rows that a (V, C) head lacks to the next multiple that this device wants."""
    return -weight.size(0) % PADDED_TO if weight.is_cuda else 0


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """(..., C) features and a (V, C) head to (..., V) logits."""
    missing = padding(weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., : weight.size(0)] if missing else F.linear(x, weight)


def too_many(x: Tensor, weight: Tensor) -> bool:
    """Whether the logits of (..., C) features are not to be had at once."""
    return x.numel() // x.size(-1) * weight.size(0) > AT_ONCE


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
        rows, vocabulary = x.size(0), weight.size(0)
        narrow, head = x.to(dtype), F.pad(weight.to(dtype), (0, 0, 0, padding(weight)))
        columns = torch.arange(head.size(0), device=x.device)
        size = max(ROWS, AT_ONCE // vocabulary // ROWS * ROWS)
        total = x.new_zeros((), dtype=torch.float32)
        d_x, d_head = [], torch.zeros_like(head, dtype=torch.float32) if wanted else None
        for part, right in zip(narrow.split(size), targets.split(size), strict=True):
            scores = (part @ head.T).float().masked_fill(columns >= vocabulary, float("-inf"))
            norm = scores.logsumexp(-1, keepdim=True)
            total = total + (norm - scores.gather(1, right.unsqueeze(1))).sum()
            if d_head is not None:
                off = torch.exp(scores - norm) - (columns == right.unsqueeze(1)).float()  # softmax less one-hot
                d_scores = (off / rows).to(dtype)
                d_x.append(d_scores @ head)
                d_head += d_scores.T @ part
        if d_head is not None:
            ctx.save_for_backward(torch.cat(d_x).to(x.dtype), d_head[:vocabulary].to(weight.dtype))
        return total / rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        return d_x * grad, d_weight * grad, None, None, None


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """F.cross_entropy(F.linear(x, weight), targets) in nats, a scalar in float32, for (N, C) features, a (V, C) head and (N,) targets."""
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        return _Chunked.apply(x, weight, targets, dtype, wanted)  # type: ignore[no-any-return]
