"""Muon (Jordan 2024): Nesterov momentum, orthogonalised by a Newton-Schulz iteration.

Matrices of equal shape are orthogonalised in batched products, and the workers share the batches. One worker
computes a whole batch, so the bits do not depend on which worker it is. Workers that hold whole matrices
receive the updates that each of them has computed. Workers that hold rows send them to the worker of each
batch, and receive the same rows of the update. `Exchange` tells which rows each worker holds, and has the
collectives.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mingpt.base.rows import RowMap, Shape
from mingpt.config import OptimizerConfig

# The most matrices in a batched product; independent of the number of workers. On a CPU one matrix takes as
# long as two together. On a GPU kernel launches are the bottleneck.
BATCH_SIZE = {"cpu": 4, "cuda": 12}
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]


@dataclass(frozen=True)
class Exchange:
    """The rows that each worker holds, and the collectives between the workers, if there are several."""

    rank: int
    rows: RowMap  # of the parameters
    # all_to_all(elements, send, receive): sends (sum(send),) elements to the ranks in order, returns the
    # (sum(receive),) elements received; `send` and `receive` are counts per rank.
    all_to_all: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor]
    # all_gather(elements, sizes): sends this rank's (sizes[rank],) elements, yields the elements of each rank
    # in order as soon as they arrive. All ranks must read the iterator to its end.
    all_gather: Callable[[Tensor, Sequence[int]], Iterator[Tensor]]


class Muon:
    """Muon, with updates scaled to the root mean square of AdamW's updates (Liu et al. 2025).

    `weights` are this worker's rows of at least one matrix, contiguous, updated in place. All workers
    construct it with the same names in the same order, and call `step` together.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: OptimizerConfig,
        exchange: Exchange,
        product_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.exchange, self.product_dtype = config, exchange, product_dtype
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        assert all(weight.is_contiguous() for weight in self.weights.values())
        self.rows, self.rank = exchange.rows, exchange.rank
        self.shapes = {name: self.rows.shapes[name] for name in weights}
        self.is_sharded = any(self.rows.by_rank(name) for name in weights)
        self.state = {
            name: {"momentum_buffer": torch.zeros_like(weight)} for name, weight in self.weights.items()
        }
        self.device = next(iter(self.weights.values())).device
        self.batches_by_rank = assign_batches(self.shapes, self.rows.workers, self.device.type)
        self.names_by_rank = [[name for batch in part for name in batch] for part in self.batches_by_rank]

    @torch.no_grad()
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights in place from gradients of the same shapes; keep the gradients. Collective."""
        assert gradients.keys() >= self.weights.keys(), "every parameter takes part in every step"
        buffers = {name: state["momentum_buffer"] for name, state in self.state.items()}
        momentum = self.config.momentum
        torch._foreach_lerp_(list(buffers.values()), [gradients[name] for name in buffers], 1 - momentum)
        torch._foreach_mul_(list(self.weights.values()), 1 - lr * self.config.weight_decay)
        step = self.step_on_rows if self.is_sharded else self.step_on_matrices
        step(lr, gradients, buffers)

    def step_on_matrices(
        self, lr: float, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> None:
        """Compute this worker's updates, receive those of the other workers, and apply all. Collective."""
        mine = self.names_by_rank[self.rank]
        nesterov = {name: self.nesterov(gradients[name], buffers[name]) for name in mine}
        computed = self.join(list(self.orthogonal(nesterov).values()))
        sizes = [[self.weights[name].numel() for name in names] for names in self.names_by_rank]
        arriving = self.exchange.all_gather(computed, [sum(of_rank) for of_rank in sizes])
        for updates, names, of_rank in zip(arriving, self.names_by_rank, sizes, strict=True):
            self.apply(names, updates.split(of_rank), lr)

    def step_on_rows(self, lr: float, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Send rows to the workers that compute the updates, apply the updates' rows received. Collective."""
        mine, ranks = self.names_by_rank[self.rank], range(self.rows.workers)
        names = [name for part in self.names_by_rank for name in part]
        sizes = [self.weights[name].numel() for name in names]
        by_owner = [sum(self.weights[name].numel() for name in part) for part in self.names_by_rank]
        rows = {name: [self.rows.of(name, rank) for rank in ranks] for name in mine}
        pieces = [
            (rank, name, len(rows[name][rank]) * self.shapes[name][1]) for rank in ranks for name in mine
        ]
        by_holder = [sum(size for holder, _, size in pieces if holder == rank) for rank in ranks]

        sent = self.join([self.nesterov(gradients[name], buffers[name]) for name in names])
        received = self.exchange.all_to_all(sent, by_owner, by_holder).split([size for *_, size in pieces])
        matrices = {
            name: torch.cat(received[number :: len(mine)]).view(self.shapes[name])
            for number, name in enumerate(mine)
        }
        updates = self.orthogonal(matrices)
        returned = [updates[name][rows[name][rank].start : rows[name][rank].stop] for rank, name, _ in pieces]
        flat = self.join(returned)
        self.apply(names, self.exchange.all_to_all(flat, by_holder, by_owner).split(sizes), lr)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Join bfloat16 tensors to one vector, (n,); there may be no tensors."""
        empty = torch.empty(0, dtype=torch.bfloat16, device=self.device)
        return torch.cat([empty, *(tensor.flatten() for tensor in tensors)])

    def nesterov(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        return gradient.lerp(buffer, self.config.momentum).bfloat16()

    def orthogonal(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return {name: whole update}, not yet scaled, of the matrices that this worker computes.

        These are names_by_rank[rank]; `matrices` has each of them whole.
        """
        updates = {}
        for batch in self.batches_by_rank[self.rank]:
            stacked = torch.stack([wide(matrices[name]) for name in batch])
            computed = newton_schulz(stacked, self.product_dtype).bfloat16()
            for name, update in zip(batch, computed, strict=True):
                updates[name] = update if is_wide(self.shapes[name]) else update.T
        return updates

    def apply(self, names: Sequence[str], updates: Sequence[Tensor], lr: float) -> None:
        """Subtract flat updates from the named weights, scaled by `lr` and a factor of the matrix's shape."""
        for name, update in zip(names, updates, strict=True):
            weight = self.weights[name]
            weight.add_(update.view_as(weight), alpha=-lr * 0.2 * math.sqrt(max(self.shapes[name])))


def assign_batches(shapes: Mapping[str, Shape], workers: int, device_type: str) -> list[list[list[str]]]:
    """Return each worker's batches of names; each batch, the costliest first, goes to the least loaded one.

    A batch has matrices of one shape, some of them perhaps transposed. All workers get the same answer.
    """
    by_shape: dict[Shape, list[str]] = {}
    for name, shape in shapes.items():
        by_shape.setdefault(tuple(sorted(shape)), []).append(name)
    size = BATCH_SIZE.get(device_type, BATCH_SIZE["cpu"])
    batches = [batch for names in by_shape.values() for batch in split_evenly(names, size)]
    costs = [sum(min(shapes[name]) * math.prod(shapes[name]) for name in batch) for batch in batches]
    assigned: list[list[list[str]]] = [[] for _ in range(workers)]
    load = [0] * workers
    for cost, batch in sorted(zip(costs, batches, strict=True), reverse=True):
        least = load.index(min(load))
        assigned[least].append(batch)
        load[least] += cost
    return assigned


def split_evenly(names: list[str], most: int) -> list[list[str]]:
    """Split names into as few lists of at most `most` as possible, whose lengths differ by at most one."""
    parts = -(-len(names) // most)
    ends = [len(names) * part // parts for part in range(parts + 1)]
    return [names[first:last] for first, last in itertools.pairwise(ends)]


def is_wide(shape: Shape) -> bool:
    return shape[0] <= shape[1]


def wide(matrix: Tensor) -> Tensor:
    """Return the matrix, or its transpose if that has fewer rows."""
    return matrix if is_wide(tuple(matrix.shape)) else matrix.T


def newton_schulz(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return (N, rows, columns) matrices in `dtype` with all singular values brought near one (Jordan 2024).

    `matrices` may have no more rows than columns.
    """
    # Small numbers are zero in float16 before they are divided by the norm.
    x = matrices.float() if dtype == torch.float16 else matrices.to(dtype)
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
