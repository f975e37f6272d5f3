import pytest
import torch

from mingpt.base.rows import RowMap, split_rows


@pytest.mark.parametrize("workers", range(1, 9))
def test_the_rows_of_the_ranks_are_those_of_torch_chunk(workers: int) -> None:
    """FSDP2 shards a parameter like this; the last ranks may have no rows."""
    for count in range(1, 40):
        rows = split_rows(count, workers)
        assert [row for part in rows for row in part] == list(range(count))
        theirs = [len(chunk) for chunk in torch.arange(count).chunk(workers)]
        assert [len(part) for part in rows] == theirs + [0] * (workers - len(theirs))


@pytest.mark.parametrize(
    ("shape", "expected"), [((5,), [2, 2, 1]), ((5, 3), [6, 6, 3]), ((2, 3, 4), [12, 12, 0])]
)
def test_elements_are_rows_times_what_is_in_one(shape: tuple[int, ...], expected: list[int]) -> None:
    assert RowMap({"w": shape}, 3, ("w",)).numel("w") == expected
