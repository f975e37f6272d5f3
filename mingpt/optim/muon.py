"""Muon (Jordan 2024): Nesterov momentum, orthogonalised by a Newton-Schulz iteration.

Matrices of one shape, or its transpose, are orthogonalised in batched products. The workers share the
batches. Each batch is computed by one worker, so the bits do not depend on the number of workers. If each
worker updates only its rows of each matrix, a step has two phases:

1. All-to-all: each worker sends its rows of each momentum matrix to the worker that computes the batch with
   this matrix. That worker then holds whole matrices, and orthogonalises them.
2. All-to-all: each worker returns the rows of its matrices' updates to the workers that update these rows.

If each worker updates all matrices whole, there is no first phase, and in the second phase each worker sends
the updates that it has computed to all workers.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from mingpt.base.rows import RowMap, Shape
from mingpt.config import OptimizerConfig

# The largest number of matrices in a batched product, for any number of workers. On a CPU, one matrix takes
# as long as two in a batch. On a GPU, kernel launches are the bottleneck.
BATCH_SIZE = {"cpu": 4, "cuda": 12}
NEWTON_SCHULZ = 5 * [(3.4445, -4.7750, 2.0315)]


class Collectives(Protocol):
    """The collectives that an optimizer needs; mingpt.distributed.transport.Transport has these methods.

    A vector is passed as a list of 1-D tensors, its pieces, which are concatenated. The list is not empty.
    """

    rank: int

    def all_to_all(self, pieces: list[Tensor], send: list[int], receive: list[int]) -> Tensor:
        """Send consecutive elements of the vector `pieces` to all ranks, `send[rank]` elements to each rank.

        Returns the elements that this rank receives, in the order of the ranks that send them.
        `receive[rank]` is the number of elements that `rank` sends to this rank.
        """

    def all_gather_parts(self, pieces: list[Tensor], sizes: list[int]) -> Iterator[Tensor]:
        """Yield the vector `pieces` of each rank, of `sizes[rank]` elements, in the order of the ranks.

        A yielded vector is valid until the next is yielded. All ranks must iterate to the end.
        """


class Muon:
    """Muon, with updates scaled to about the root mean square of AdamW's updates (Liu et al. 2025).

    `weights` has this worker's rows of each matrix, as `rows` says; there is at least one matrix. The tensors
    are contiguous, and are updated in place. Products are computed in `product_dtype`. All workers construct
    the optimizer with the same names in the same order, and call `step` together.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        config: OptimizerConfig,
        rows: RowMap,
        transport: Collectives,
        product_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.config, self.rows, self.transport, self.product_dtype = config, rows, transport, product_dtype
        self.weights = {name: weight.detach() for name, weight in weights.items()}
        assert all(weight.is_contiguous() for weight in self.weights.values())
        self.shapes = {name: rows.shapes[name] for name in weights}
        self.is_sharded = any(rows.by_rank(name) for name in weights)
        self.state = {
            name: {"momentum_buffer": torch.zeros_like(weight)} for name, weight in self.weights.items()
        }
        device = next(iter(self.weights.values())).device
        self.empty = torch.empty(0, dtype=torch.bfloat16, device=device)
        self.batches_by_rank = assign_batches(self.shapes, rows.workers, device.type)
        self.names_by_rank = [[name for batch in part for name in batch] for part in self.batches_by_rank]
        self.mine = self.names_by_rank[transport.rank]

    @torch.no_grad()
    def step(self, lr: float, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights in place from gradients of the same shapes, which stay unchanged. Collective."""
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
        """Compute this worker's updates, receive the other workers' updates, and apply all. Collective.

        `buffers` has the momentum of each matrix, to which `step` has already added `gradients`.
        """
        updates = self.orthogonal({name: self.nesterov(gradients[name], buffers[name]) for name in self.mine})
        sizes = [[self.weights[name].numel() for name in names] for names in self.names_by_rank]
        arriving = self.transport.all_gather_parts(
            self.flat(updates.values()), [sum(of_rank) for of_rank in sizes]
        )
        for vector, names, of_rank in zip(arriving, self.names_by_rank, sizes, strict=True):
            self.apply(names, vector.split(of_rank), lr)

    def step_on_rows(self, lr: float, gradients: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Update this worker's rows of each matrix. Collective.

        The workers exchange rows of the momentum for whole matrices, orthogonalise these, and exchange rows
        of the updates. `buffers` has this worker's rows of the momentum of each matrix, to which `step` has
        already added `gradients`, the same rows of the gradients.
        """
        names = [name for part in self.names_by_rank for name in part]
        sizes = [self.weights[name].numel() for name in names]
        by_owner = [sum(self.weights[name].numel() for name in part) for part in self.names_by_rank]
        counts = [self.rows.numel(name) for name in self.mine]  # [matrix][rank], in elements
        counts_by_rank = [[count[rank] for count in counts] for rank in range(self.rows.workers)]
        by_holder = [sum(of_rank) for of_rank in counts_by_rank]

        rows = [self.nesterov(gradients[name], buffers[name]) for name in names]
        received = self.transport.all_to_all(self.flat(rows), by_owner, by_holder)
        pieces = received.split([count for of_rank in counts_by_rank for count in of_rank])
        matrices = {
            name: torch.cat(pieces[place :: len(self.mine)]).view(self.shapes[name])
            for place, name in enumerate(self.mine)
        }

        updates = self.orthogonal(matrices)
        cut = [updates[name].flatten().split(count) for name, count in zip(self.mine, counts, strict=True)]
        returned = [piece for of_rank in zip(*cut, strict=True) for piece in of_rank]
        arrived = self.transport.all_to_all(self.flat(returned), by_holder, by_owner)
        self.apply(names, arrived.split(sizes), lr)

    def flat(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return `tensors`, which are bfloat16, each flattened: a list of the pieces of one vector.

        An empty piece comes first, because a vector must have at least one piece.
        """
        return [self.empty, *(tensor.flatten() for tensor in tensors)]

    def nesterov(self, gradient: Tensor, buffer: Tensor) -> Tensor:
        return gradient.lerp(buffer, self.config.momentum).bfloat16()

    def orthogonal(self, matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Orthogonalise this worker's share of the matrices; return the unscaled updates, by name.

        `matrices` has this share by name, each matrix whole.
        """
        updates = {}
        for batch in self.batches_by_rank[self.transport.rank]:
            stacked = torch.stack([wide(matrices[name], self.shapes[name]) for name in batch])
            computed = newton_schulz(stacked, self.product_dtype).bfloat16()
            for name, update in zip(batch, computed, strict=True):
                updates[name] = wide(update, self.shapes[name])
        return updates

    def apply(self, names: Sequence[str], updates: Sequence[Tensor], lr: float) -> None:
        """Subtract the flat `updates`, times `lr` and a factor for the shape, from the weights `names`."""
        for name, update in zip(names, updates, strict=True):
            weight = self.weights[name]
            weight.add_(update.view_as(weight), alpha=-lr * 0.2 * math.sqrt(max(self.shapes[name])))


def assign_batches(shapes: Mapping[str, Shape], workers: int, device_type: str) -> list[list[list[str]]]:
    """Return, for each worker, its batches of matrices; a batch is a list of names.

    `device_type` determines the largest batch. The matrices of a batch have one shape or its transpose. The
    costliest batch goes first, and each batch to the worker with the lowest cost so far. So if there are few
    batches, some workers get none.
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
    """Split names into the fewest lists of at most `most` names, with lengths that differ by at most one."""
    parts = -(-len(names) // most)
    ends = [len(names) * part // parts for part in range(parts + 1)]
    return [names[first:last] for first, last in itertools.pairwise(ends)]


def wide(matrix: Tensor, shape: Shape) -> Tensor:
    """Return the matrix, transposed if `shape` has more rows than columns.

    A call with the result and the same `shape` undoes this.
    """
    return matrix if shape[0] <= shape[1] else matrix.T


def newton_schulz(matrices: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return `matrices`, (N, rows, columns), with singular values brought near one (Jordan 2024).

    Singular values that are tiny, or tiny compared with the matrix's norm, stay smaller. The result has
    `dtype`, in which the products are computed. A matrix must not have more rows than columns.
    """
    # In float16, small numbers would become zero before they are divided by the norm.
    x = matrices.float() if dtype == torch.float16 else matrices.to(dtype)
    x = (x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for a, b, c in NEWTON_SCHULZ:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x
