"""Which rows of a tensor each rank holds, where tensors are sharded."""

from collections.abc import Sequence


def split_rows(rows: int, workers: int) -> list[range]:
    """Those of each rank: chunks of ceil(rows / workers), the last ones shorter or empty.

    These are torch.chunk's chunks of dimension 0, as FSDP2 shards a parameter.
    """
    size = -(-rows // workers)
    return [range(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(workers)]


def numel_by_rank(shape: Sequence[int], workers: int) -> list[int]:
    """Elements of each rank's rows of a tensor of this shape, which has at least one dimension."""
    columns = 1
    for size in shape[1:]:
        columns *= size
    return [len(rows) * columns for rows in split_rows(shape[0], workers)]
