import pytest
import torch
from torch import Tensor, nn

from mingpt.config import OptimizerConfig
from mingpt.optim import Muon
from mingpt.optim.muon import AllGather, assign_batches, newton_schulz, wide
from mingpt.optim.optimizer import add_dimension

SHAPES = ((8, 24), (24, 8), (8, 8), (8, 24), (8, 24), (16, 8), (8, 24))


def make_matrices() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape) for shape in SHAPES]


def updated(matrices: list[Tensor], rank: int, workers: int, all_gather: AllGather) -> list[Tensor]:
    """The matrices after one update, by a worker whose gradients are the matrices' squares."""
    weights = {f"h.{number}": nn.Parameter(matrix.clone()) for number, matrix in enumerate(matrices)}
    for weight in weights.values():
        weight.grad = weight.detach().square()
    Muon(weights, OptimizerConfig(), rank, workers, all_gather).step(0.01)
    return [weight.detach() for weight in weights.values()]


@pytest.mark.parametrize("workers", [2, 3, 9])
def test_several_workers_compute_the_bits_of_one(workers: int) -> None:
    matrices = make_matrices()
    alone = updated(matrices, 0, 1, add_dimension)
    rows: list[Tensor] = []

    def keep(row: Tensor) -> Tensor:
        rows.append(row)
        return torch.zeros(workers, len(row), dtype=row.dtype)

    for rank in range(workers):
        updated(matrices, rank, workers, keep)
    assert len(rows) == workers
    together = updated(matrices, 0, workers, lambda _: torch.stack(rows))
    assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    assert not any(torch.equal(one, other) for one, other in zip(alone, matrices, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 3, 9])
def test_each_matrix_is_assigned_once_in_batches_of_one_shape(workers: int) -> None:
    weights = {f"h.{number}": nn.Parameter(matrix) for number, matrix in enumerate(make_matrices())}
    assigned = assign_batches(weights, workers)
    assert len(assigned) == workers
    batches = [batch for part in assigned for batch in part]
    assert sorted(name for batch in batches for name in batch) == sorted(weights)
    for batch in batches:
        assert len({wide(weights[name]).shape for name in batch}) == 1
    in_alone = sorted(batch for part in assign_batches(weights, 1) for batch in part)
    assert sorted(batches) == in_alone


def test_newton_schulz_brings_all_singular_values_near_one() -> None:
    """Its coefficients are chosen for about 0.7 to 1.2."""
    torch.manual_seed(1)
    values = torch.linalg.svdvals(newton_schulz(torch.randn(5, 12, 30)).float())
    assert 0.6 < values.min() < values.max() < 1.3
