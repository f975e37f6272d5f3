"""The head and its loss: cross-entropy over the vocabulary, in chunks of rows where the vocabulary is large.

GPT-2's 50,257 logits for each of 16 x 1,024 tokens are 3.3 GB in float32, and their gradient as much again.
Here at most MAX_LOGITS logits, or ROW_MULTIPLE rows, exist at once: the loss is a mean, so a chunk's part of
the gradient can be computed with its logits, and no product is computed twice (compare Hsu et al. 2024,
"Liger Kernel").

On a GPU the vocabulary is padded to a multiple of VOCAB_MULTIPLE inside the product, as tensor cores need it;
parameters and results keep their size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_LOGITS = 1 << 26
VOCAB_MULTIPLE = 64
ROW_MULTIPLE = 128


def padding(weight: Tensor) -> int:
    """Return how many rows a (V, C) head on a GPU lacks to a multiple of VOCAB_MULTIPLE; 0 elsewhere."""
    return -weight.size(0) % VOCAB_MULTIPLE if weight.is_cuda else 0


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return the (..., V) logits of (..., C) features and a (V, C) head."""
    missing = padding(weight)
    if not missing:
        return F.linear(x, weight)
    return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., : weight.size(0)]


def needs_chunking(x: Tensor, weight: Tensor) -> bool:
    """Return whether (..., C) features and a (V, C) head give more than MAX_LOGITS logits."""
    return x.numel() // x.size(-1) * weight.size(0) > MAX_LOGITS


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype, needs_grad: bool
    ) -> Tensor:
        rows, vocab_size = x.size(0), weight.size(0)
        features, head = x.to(dtype), F.pad(weight.to(dtype), (0, 0, 0, padding(weight)))
        columns = torch.arange(head.size(0), device=x.device)
        size = max(ROW_MULTIPLE, MAX_LOGITS // vocab_size // ROW_MULTIPLE * ROW_MULTIPLE)
        # Divided by the rows, most gradients of logits would be zero in float16: `backward` divides the rest.
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


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return F.cross_entropy(F.linear(x, weight), targets) in nats, a float32 scalar.

    `x` has (N, C) features, `weight` is the (V, C) head, and there are (N,) targets, all in range(V).
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    with torch.autocast(device, enabled=False):
        loss: Tensor = _ChunkedCrossEntropy.apply(x, weight, targets, dtype, needs_grad)
    return loss
