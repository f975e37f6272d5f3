"""The norm of a gradient, the same bits whoever holds which rows of it.

Each row is summed by whoever holds it, then all rows in the order of the tensors by everybody. A norm of each
shard, as torch.nn.utils.clip_grad_norm_ takes it of sharded gradients, depends on the number of workers.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mingpt.parallel.shards import split_rows


def row_norms(gradient: Tensor) -> Tensor:
    """(rows,) norms of the rows of a (rows, columns) gradient; the absolute values of a vector."""
    if gradient.ndim < 2:
        return gradient.abs()
    return torch.linalg.vector_norm(gradient, dim=1)


def total_norm(norms: Tensor) -> Tensor:
    """The scalar norm of a gradient whose rows have these norms."""
    return norms.double().square_().sum().sqrt_().float()


class RowGatherer:
    """Brings the norms of all ranks' rows into the order of the tensors; `shapes` are the whole ones."""

    def __init__(
        self, shapes: Sequence[Sequence[int]], workers: int, all_gather: Callable[[Tensor], Tensor]
    ) -> None:
        self.all_gather = all_gather  # (n,) of each rank to (workers, n)
        parts = [split_rows(shape[0], workers) for shape in shapes]
        counts = [sum(len(part[rank]) for part in parts) for rank in range(workers)]
        self.size = max(counts)
        places, taken = [], [0] * workers
        for part in parts:
            for rank, rows in enumerate(part):
                begin = rank * self.size + taken[rank]
                places.append(torch.arange(begin, begin + len(rows)))
                taken[rank] += len(rows)
        self.order = torch.cat(places)

    def gather(self, norms: Tensor) -> Tensor:
        """(rows,) of this rank's rows, tensor by tensor, to those of all rows. Collective."""
        padded = torch.cat([norms, norms.new_zeros(self.size - len(norms))])
        self.order = self.order.to(norms.device)
        return self.all_gather(padded).flatten()[self.order]


def clip(gradients: Mapping[str, Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale the gradients, in place, so that their norm is at most this; 0 leaves them."""
    if not max_norm:
        return
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    if norm.is_cuda:  # without waiting for it
        torch._foreach_mul_(list(gradients.values()), factor)
    elif float(factor) < 1.0:
        torch._foreach_mul_(list(gradients.values()), float(factor))
