from itertools import accumulate

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from mingpt.base.rows import RowMap


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
