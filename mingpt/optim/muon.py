"""Muon (Jordan 2024): Nesterov momentum, orthogonalised by a Newton-Schulz iteration.

Matrices of equal shape are orthogonalised in batched products, and the workers share the batches. A batch is
computed by one worker and broadcast, so the bits do not depend on which one it is.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig
from mingpt.optim.adamw import gradients_of

# Matrices per batched product; independent of the number of workers. On a GPU launches are the bottleneck.
BATCH_SIZE = {"cpu": 3, "cuda": 12}
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]

AllGather = Callable[[Tensor], Tensor]  # (n,) of each worker to (workers, n), the same on all


class Muon:
    """Updates have the root mean square of AdamW's (Liu et al. 2025). All workers call `step` together."""

    def __init__(
        self,
        weights: dict[str, nn.Parameter],
        config: OptimizerConfig,
        rank: int,
        workers: int,
        all_gather: AllGather,
    ) -> None:
        self.weights, self.config, self.rank, self.all_gather = weights, config, rank, all_gather
        self.state = {name: {"momentum_buffer": torch.zeros_like(weight)} for name, weight in weights.items()}
        self.batches_by_rank = assign_batches(weights, workers)
        # Elements that a worker contributes to the all-gather: those of the largest part.
        self.gathered_size = max(
            sum(weights[name].numel() for batch in part for name in batch) for part in self.batches_by_rank
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update every matrix in place from its gradient."""
        gradients = dict(zip(self.weights, gradients_of(self.weights), strict=True))
        buffers = {name: state["momentum_buffer"] for name, state in self.state.items()}
        torch._foreach_lerp_(list(buffers.values()), list(gradients.values()), 1 - self.config.momentum)
        computed = []
        for batch in self.batches_by_rank[self.rank]:
            nesterov = [wide(gradients[name].lerp(buffers[name], self.config.momentum)) for name in batch]
            computed.append(newton_schulz(torch.stack(nesterov)).flatten())
        padding = self.gathered_size - sum(map(len, computed))
        device = next(iter(buffers.values())).device
        computed_here = torch.cat([*computed, torch.zeros(padding, dtype=torch.bfloat16, device=device)])
        updates = self.all_gather(computed_here)  # (workers, gathered_size)
        torch._foreach_mul_(list(self.weights.values()), 1 - lr * self.config.weight_decay)
        for row, part in zip(updates, self.batches_by_rank, strict=True):
            names = [name for batch in part for name in batch]
            sizes = [self.weights[name].numel() for name in names]
            for name, update in zip(names, row[: sum(sizes)].split(sizes), strict=True):
                weight = self.weights[name]
                is_wide = weight.size(0) <= weight.size(1)
                update = update.view_as(weight) if is_wide else update.view(weight.shape[::-1]).T
                weight.add_(update, alpha=-lr * 0.2 * math.sqrt(max(weight.shape)))


def assign_batches(weights: dict[str, nn.Parameter], workers: int) -> list[list[list[str]]]:
    """Batches of names of equally shaped matrices per worker; the largest first, to the least loaded."""
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name, weight in weights.items():
        by_shape.setdefault(tuple(sorted(weight.shape)), []).append(name)
    size = BATCH_SIZE.get(next(iter(weights.values())).device.type, BATCH_SIZE["cpu"])
    batches = [
        names[first : first + size] for names in by_shape.values() for first in range(0, len(names), size)
    ]
    costs = [sum(min(weights[name].shape) * weights[name].numel() for name in batch) for batch in batches]
    assigned: list[list[list[str]]] = [[] for _ in range(workers)]
    load = [0] * workers
    for cost, batch in sorted(zip(costs, batches, strict=True), reverse=True):
        least = load.index(min(load))
        assigned[least].append(batch)
        load[least] += cost
    return assigned


def wide(matrix: Tensor) -> Tensor:
    """The matrix, or its transpose, so that it has no more rows than columns."""
    return matrix if matrix.size(0) <= matrix.size(1) else matrix.T


def newton_schulz(matrices: Tensor) -> Tensor:
    """(N, rows, columns), rows <= columns: all singular values near one, in bfloat16 (Jordan 2024)."""
    x = matrices.bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
