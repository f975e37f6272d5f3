"""How the workers of an optimizer share tensors: which rows each holds, and the collectives between them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor


def all_rows(count: int) -> list[range]:
    """The rows of a single worker."""
    return [range(count)]


def receive_own(sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """The all-to-all of a single worker."""
    return sent


def keep(own: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
    """The all-gather of a single worker."""
    return iter([own])


@dataclass(frozen=True)
class Exchange:
    """The defaults are those of a single worker."""

    rank: int = 0
    workers: int = 1
    # Whether each worker holds rows(n)[rank] of each tensor with n rows; else each holds all rows.
    is_sharded: bool = False
    # n rows to the rows of each rank.
    rows: Callable[[int], Sequence[range]] = all_rows
    # (sum(send),) elements for the ranks in order, `send` and `receive` counts per rank, to (sum(receive),).
    all_to_all: Callable[[Tensor, Sequence[int], Sequence[int]], Tensor] = receive_own
    # (sizes[rank],) elements of this rank to those of all ranks, in order, each as soon as it is there. To be
    # taken to the last, by all ranks.
    all_gather: Callable[[Tensor, Sequence[int]], Iterator[Tensor]] = keep
