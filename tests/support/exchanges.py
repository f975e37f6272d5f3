"""Workers of an optimizer, as threads of one process that exchange tensors as objects."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.base.rows import RowMap, Shape
from mingpt.distributed import DistributedContext
from mingpt.optim import Exchange
from support.ranks import lone_rank, run_ranks

R = TypeVar("R")


class FakeWorkers:
    """Runs a function in as many threads as there are workers; each gets its own Exchange."""

    def __init__(self, workers: int, is_sharded: bool, shapes: Mapping[str, Shape]) -> None:
        self.workers = workers
        self.rows = RowMap(shapes, workers, ("",) if is_sharded else ())

    def exchange(self, context: DistributedContext) -> Exchange:
        rank = context.rank

        def all_to_all(sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
            assert sent.ndim == 1 and sent.is_contiguous() and len(sent) == sum(send)
            parts = context.all_gather_object(sent.clone().split(list(send)))
            received = [part[rank] for part in parts]
            assert [len(part) for part in received] == list(receive)
            return torch.cat(received)

        def all_gather(own: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
            assert own.ndim == 1
            parts = context.all_gather_object(own.clone())
            assert [len(part) for part in parts] == list(sizes)
            yield from parts

        return Exchange(rank, self.rows, all_to_all, all_gather)

    def run(self, work: Callable[[Exchange], R]) -> list[R]:
        """The results of `work`, by rank. Raises an exception that a rank has raised."""
        results: list[Any] = run_ranks(self.workers, lambda context: work(self.exchange(context)))
        errors = [result for result in results if isinstance(result, Exception)]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return results


def single_worker(shapes: Mapping[str, Shape]) -> Exchange:
    """The Exchange of a single worker."""
    return FakeWorkers(1, False, shapes).exchange(lone_rank())


def pieces(tensors: Mapping[str, Tensor], exchange: Exchange) -> dict[str, Tensor]:
    """Copies of this worker's rows, or of all rows if it holds tensors whole."""
    rows = {name: exchange.rows.of(name, exchange.rank) for name in tensors}
    return {name: tensor[rows[name].start : rows[name].stop].clone() for name, tensor in tensors.items()}
