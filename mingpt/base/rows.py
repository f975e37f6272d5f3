"""A map that says which rank holds which rows of a tensor, for saving, loading, summing and updating."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

Shape = tuple[int, ...]
T = TypeVar("T")


def split_rows(rows: int, workers: int) -> list[range]:
    """Return each rank's rows: chunks of ceil(rows / workers) rows; the last chunks may be shorter or empty.

    FSDP2 shards dimension 0 of a parameter in the same way, by torch.chunk.
    """
    size = -(-rows // workers)
    return [range(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(workers)]


@dataclass(frozen=True)
class RowMap:
    """A map from a tensor's name to the rows that each of `workers` ranks holds.

    `shapes` has each tensor's shape before sharding, by name. Tensors whose names begin with one of the
    prefixes `sharded` are split along dimension 0 by `split_rows`. Each rank holds all rows of the other
    tensors, and all scalars. A scalar counts as one row.
    """

    shapes: Mapping[str, Shape]
    workers: int = 1
    sharded: tuple[str, ...] = ()

    def by_rank(self, name: str) -> list[range] | None:
        """Return each rank's rows of a sharded tensor; None for another, which each rank holds whole."""
        shape = self.shapes[name]
        return split_rows(shape[0], self.workers) if shape and name.startswith(self.sharded) else None

    def of(self, name: str, rank: int) -> range:
        """Return the rows of a tensor that `rank` holds."""
        rows = self.by_rank(name)
        return rows[rank] if rows else range(self.shapes[name][0] if self.shapes[name] else 1)

    def first(self, name: str, rank: int) -> int:
        """Return where the elements that `rank` holds begin, as an index in the flattened tensor."""
        return self.of(name, rank).start * math.prod(self.shapes[name][1:])

    def numel(self, name: str) -> list[int]:
        """Return, for each rank, how many elements of a tensor the rank holds."""
        columns = math.prod(self.shapes[name][1:])
        return [len(self.of(name, rank)) * columns for rank in range(self.workers)]


def in_batches(items: Iterable[T], size_of: Callable[[T], int], largest: int) -> Iterator[list[T]]:
    """Yield the items in order, in lists.

    The sizes of a list's items, as `size_of` returns them, add up to at most `largest`. An item that is
    larger has a list of its own.
    """
    batch, size = list[T](), 0
    for item in items:
        size += size_of(item)
        if batch and size > largest:
            yield batch
            batch, size = [], size_of(item)
        batch.append(item)
    if batch:
        yield batch
