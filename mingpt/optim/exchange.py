"""How the workers of an optimizer share tensors: which rows each holds, and the collectives between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor


def all_rows(count: int) -> list[range]:
    """The rows of a single worker."""
    return [range(count)]


def receive_own(sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
    """The all-to-all of a single worker."""
    return sent


def keep(tensor: Tensor, source: int) -> Callable[[], None]:
    """The broadcast of a single worker."""
    return lambda: None


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
    # Begins to bring (n,) elements from that rank to all, in place, n > 0; the result waits for them.
    broadcast: Callable[[Tensor, int], Callable[[], None]] = keep
