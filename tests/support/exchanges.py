"""Runs the workers of an optimizer as threads of this process, and makes the pieces that they hold."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.distributed.transport import Transport
from support.ranks import run_ranks

R = TypeVar("R")


def run_workers(rows: RowMap, work: Callable[[RowMap, Transport], R]) -> list[R]:
    """Run `work` on `rows.workers` ranks; return its results by rank. Raises an exception of a rank."""
    results: list[Any] = run_ranks(rows.workers, lambda context: work(rows, context.transport))
    errors = [result for result in results if isinstance(result, Exception)]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
    return results


def pieces(tensors: Mapping[str, Tensor], rows: RowMap, rank: int) -> dict[str, Tensor]:
    """Copies, by name, of the rows that a rank holds: all rows of a tensor that `rows` does not split."""
    own = {name: rows.of(name, rank) for name in tensors}
    return {name: tensor[own[name].start : own[name].stop].clone() for name, tensor in tensors.items()}
