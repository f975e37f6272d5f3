import pytest
import torch
from support.exchanges import pieces, run_workers
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import OptimizerConfig
from mingpt.distributed.transport import Transport
from mingpt.optim.muon import Muon, newton_schulz

SHAPES = {
    f"h.{number}": shape
    for number, shape in enumerate(
        ((8, 24), (24, 8), (8, 8), (8, 24), (8, 24), (16, 8), (8, 24), (3, 17), (17, 3), (1, 5), (29, 13))
    )
}
STEPS = 3


def make_matrices() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(rows: RowMap, transport: Transport) -> list[dict[str, Tensor]]:
    """The weights and momentum after some steps, this worker's rows or all rows."""
    matrices = make_matrices()
    weights = pieces(matrices, rows, transport.rank)
    muon = Muon(weights, OptimizerConfig(), rows, transport)
    for step in range(STEPS):
        gradients = {name: (matrix + step).square() for name, matrix in matrices.items()}
        given = pieces(gradients, rows, transport.rank)
        muon.step(0.01, given)
        for name, gradient in pieces(gradients, rows, transport.rank).items():
            assert torch.equal(given[name], gradient)
    return [weights, {name: state["momentum_buffer"] for name, state in muon.state.items()}]


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 13])
def test_several_workers_compute_the_bits_of_one(workers: int) -> None:
    """Some workers have no batch to compute."""
    alone = trained(RowMap(SHAPES), Transport(0, 1))
    for together in run_workers(RowMap(SHAPES, workers), trained):
        for expected, found in zip(alone, together, strict=True):
            assert all(torch.equal(expected[name], found[name]) for name in SHAPES)
    assert not any(torch.equal(alone[0][name], matrix) for name, matrix in make_matrices().items())


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 13])
def test_rows_of_several_workers_have_the_bits_of_whole_matrices(workers: int) -> None:
    """Some matrices have fewer rows than there are workers."""
    alone = trained(RowMap(SHAPES), Transport(0, 1))
    parts = run_workers(RowMap(SHAPES, workers, ("",)), trained)
    for number, expected in enumerate(alone):
        for name in SHAPES:
            together = torch.cat([part[number][name] for part in parts])
            assert torch.equal(together, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-9])  # such numbers are zero in float16
def test_newton_schulz_brings_all_singular_values_near_one(dtype: torch.dtype, size: float) -> None:
    """The iteration's coefficients are chosen to give about 0.7 to 1.2."""
    torch.manual_seed(1)
    computed = newton_schulz(size * torch.randn(5, 128, 300), dtype)
    assert computed.dtype == dtype
    values = torch.linalg.svdvals(computed.float())
    assert 0.6 < values.min() < values.max() < 1.3


@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (128, 512)])
def test_a_matrix_has_the_same_bits_in_every_batch(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([newton_schulz(matrix) for matrix in matrices.split(1)])
    for size in (2, 3, 5):
        assert torch.equal(torch.cat([newton_schulz(part) for part in matrices.split(size)]), alone)
