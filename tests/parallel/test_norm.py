"""The gradient's norm has the same bits however its rows are split, since each row's norm has."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.parallel.strategy import RowGatherer, clip, row_norms, total_norm

# 16 and 48 columns are whole vectors of the CPU, 3 and 70,001 are not. There are tensors of one row, with
# fewer rows than workers, of one element, and of three dimensions, as a convolution's.
SHAPES = [(70, 48), (5, 3), (1, 70_001), (2, 70_000), (11,), (), (300, 1), (3, 4097), (40, 16), (5, 2, 3)]


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def make_gradients() -> list[Tensor]:
    """Gradients of very different sizes, so that the order of additions shows."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator).exp() * 3.0**-number for number, shape in enumerate(SHAPES)
    ]


def gather_norms(gradients: list[Tensor], workers: int) -> list[Tensor]:
    """The norms of all rows as each worker has them, from its own rows and the other workers'."""
    rows = RowMap({str(number): shape for number, shape in enumerate(SHAPES)}, workers, ("",))
    parts = [rows.by_rank(name) for name in rows.shapes]
    own = [
        torch.cat(
            [
                row_norms(gradient[part[rank].start : part[rank].stop] if part else gradient)
                for gradient, part in zip(gradients, parts, strict=True)
            ]
        )
        for rank in range(workers)
    ]
    longest = max(map(len, own))
    padded = torch.stack([torch.cat([norms, norms.new_zeros(longest - len(norms))]) for norms in own])
    norms = []
    for rank in range(workers):

        def all_gather(mine: Tensor, length: int, rank: int = rank) -> Tensor:
            assert torch.equal(mine, own[rank]) and length == longest
            return padded

        gatherer = RowGatherer(rows, rows.shapes, all_gather)
        norms.append(gatherer.gather(own[rank]))
    return norms


@pytest.mark.parametrize("workers", range(1, 9))
def test_the_norm_does_not_depend_on_who_holds_which_rows(workers: int, threads: int) -> None:
    gradients = make_gradients()
    expected = torch.cat([row_norms(gradient) for gradient in gradients])
    for norms in gather_norms(gradients, workers):
        assert torch.equal(norms, expected)
    exact = torch.cat([gradient.flatten() for gradient in gradients]).double().norm()
    assert float(total_norm(expected)) == pytest.approx(float(exact), rel=1e-6)


@pytest.mark.parametrize("columns", [1, 15, 16, 17, 1000, 32_768, 32_769, 70_000])
def test_the_norm_of_a_row_does_not_depend_on_its_neighbours(columns: int, threads: int) -> None:
    rows = torch.randn(7, columns, generator=torch.Generator().manual_seed(columns))
    whole = row_norms(rows)
    for size in (1, 2, 3):
        assert torch.equal(torch.cat([row_norms(part) for part in rows.split(size)]), whole)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_has_such_a_norm(broken: float) -> None:
    gradient = torch.ones(3, 4)
    gradient[2, 1] = broken
    assert not torch.isfinite(total_norm(row_norms(gradient)))


@pytest.mark.parametrize(("max_norm", "factor"), [(0.5, 0.1), (5.1, 1.0), (1000.0, 1.0), (0.0, 1.0)])
def test_gradients_are_scaled_down_to_the_largest_norm_and_never_up(max_norm: float, factor: float) -> None:
    before = {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([4.0]), "none": torch.empty(0, 2)}
    gradients = {name: gradient.clone() for name, gradient in before.items()}
    norm = total_norm(torch.cat([row_norms(gradient) for gradient in gradients.values()]))
    assert float(norm) == 5.0
    clip(gradients, norm, max_norm)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, before[name] * factor, rtol=1e-6, atol=0.0)
        assert factor < 1.0 or torch.equal(gradient, before[name])
