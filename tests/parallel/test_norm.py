"""How rows are split, and the gradient's norm, which has the same bits however they are split."""

from collections.abc import Iterator
from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from torch.nn.utils.rnn import pad_sequence

from mingpt.base.rows import RowMap
from mingpt.parallel.strategy import RowGatherer, clip, row_norms, total_norm


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


# 16 and 48 columns are whole vectors of the CPU, others are not. There are tensors of one row, of one
# element, and of three dimensions, as a convolution's.
SHAPES = [(7, columns) for columns in (1, 15, 16, 17, 1000, 32_768, 32_769, 70_000)]
SHAPES += [(70, 48), (1, 70_001), (300, 1), (3, 4097), (1, 1)]


@pytest.mark.parametrize("shape", [*SHAPES, (11,), (5, 2, 3)])
def test_the_norm_of_a_row_does_not_depend_on_its_neighbours(shape: tuple[int, ...], threads: int) -> None:
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0)).exp()
    whole = row_norms(gradient)
    for size in (1, 2, 3):
        assert torch.equal(torch.cat([row_norms(part) for part in gradient.split(size)]), whole)
    assert float(total_norm(whole)) == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@examples(100)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 8), st.sampled_from(["", "1"]))
def test_all_workers_have_the_norm_of_each_row_once_and_in_order(
    counts: list[int], workers: int, sharded: str
) -> None:
    """A count of 0 is a tensor without dimensions. Some tensors have fewer rows than there are workers."""
    shapes = {str(number): (count,) if count else () for number, count in enumerate(counts)}
    rows = RowMap(shapes, workers, (sharded,))
    norms = {name: torch.rand(shape).reshape(-1) for name, shape in shapes.items()}
    own = []
    for rank in range(workers):
        parts = [norms[name][rows.of(name, rank).start : rows.of(name, rank).stop] for name in shapes]
        own.append(torch.cat(parts))
    gathered = pad_sequence(own, batch_first=True)
    gatherer = RowGatherer(rows, shapes, lambda mine, length: gathered[:, :length])
    assert torch.equal(gatherer.gather(own[0]), torch.cat([*norms.values()]))
    assert gatherer.length == gathered.size(1)


@pytest.mark.parametrize(
    ("max_norm", "factor"), [(0.5, 0.1), (4.5, 0.9), (5.1, 1.0), (1000.0, 1.0), (0.0, 1.0)]
)
def test_gradients_are_scaled_down_to_the_largest_norm_and_never_up(max_norm: float, factor: float) -> None:
    before = [torch.tensor([[3.0], [0.0]]), torch.tensor([4.0]), torch.empty(0, 2), torch.tensor(0.0)]
    gradients = {str(number): gradient.clone() for number, gradient in enumerate(before)}
    norm = total_norm(torch.cat([row_norms(gradient) for gradient in before]))
    assert float(norm) == 5.0
    clip(gradients, norm, max_norm)
    for gradient, old in zip(gradients.values(), before, strict=True):
        torch.testing.assert_close(gradient, old * factor, rtol=1e-6 if factor < 1.0 else 0.0, atol=0.0)


@examples(300)
@given(st.integers(1, 40), st.lists(st.integers(1, 5), max_size=2), st.integers(1, 9))
def test_the_rows_of_the_ranks_are_those_of_torch_chunk(count: int, columns: list[int], workers: int) -> None:
    """FSDP2 shards a parameter like this; the last ranks may have no rows."""
    rows = RowMap({"split": (count, *columns), "scalar": (), "whole": (count,)}, workers, ("s",))
    chunks = [*torch.arange(count).chunk(workers), *[torch.empty(0)] * workers][:workers]
    assert [[*part] for part in rows.by_rank("split") or []] == [chunk.tolist() for chunk in chunks]
    one_row = torch.ones(columns).numel()
    assert rows.numel("split") == [len(chunk) * one_row for chunk in chunks]
    firsts = [rows.first("split", rank) for rank in range(workers)]
    assert firsts == [0, *accumulate(rows.numel("split"))][:-1]
    for name, everything in (("whole", count), ("scalar", 1)):
        assert rows.by_rank(name) is None
        assert {rows.of(name, rank) for rank in range(workers)} == {range(everything)}
