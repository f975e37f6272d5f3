"""Workers of an optimizer as threads of one process, which exchange tensors through a list."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.optim import Exchange
from mingpt.parallel import split_rows
from support.ranks import run_in_threads

R = TypeVar("R")
TIMEOUT_S = 30


class FakeWorkers:
    """Runs a function in as many threads as there are workers; each gets its own Exchange."""

    def __init__(self, workers: int, is_sharded: bool) -> None:
        self.workers, self.is_sharded = workers, is_sharded
        self.barrier = threading.Barrier(workers, timeout=TIMEOUT_S)
        self.board: list[list[Tensor]] = [[] for _ in range(workers)]  # per sender, a part per receiver
        self.bytes_sent = 0

    def exchange(self, rank: int) -> Exchange:
        def all_to_all(sent: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
            assert sent.ndim == 1 and sent.is_contiguous() and len(sent) == sum(send)
            self.board[rank] = list(sent.split(list(send)))
            self.barrier.wait()
            received = [self.board[source][rank].clone() for source in range(self.workers)]
            assert [len(part) for part in received] == list(receive)
            self.barrier.wait()
            return torch.cat(received)

        def all_gather(own: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
            assert own.ndim == 1 and len(own) == sizes[rank]
            self.board[rank] = [own]
            self.barrier.wait()
            if rank == 0:
                self.bytes_sent += sum(part.nbytes for (part,) in self.board)
            for source, size in enumerate(sizes):
                assert self.board[source][0].shape == (size,)
                yield self.board[source][0].clone()
            self.barrier.wait()

        return Exchange(
            rank,
            self.workers,
            self.is_sharded,
            lambda rows: split_rows(rows, self.workers),
            all_to_all,
            all_gather,
        )

    def run(self, work: Callable[[Exchange], R]) -> list[R]:
        """What `work` returns for each rank. Raises what one of them raised."""

        def run_rank(rank: int) -> R:
            try:
                return work(self.exchange(rank))
            except Exception:
                self.barrier.abort()
                raise

        results: list[Any] = run_in_threads(self.workers, run_rank)
        errors = [result for result in results if isinstance(result, Exception)]
        errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
        if errors:
            raise errors[0]
        return results


def single_worker() -> Exchange:
    """That of a single worker."""
    return FakeWorkers(1, is_sharded=False).exchange(0)


def piece(tensor: Tensor, exchange: Exchange) -> Tensor:
    """A copy of this worker's rows, or of all rows if it holds tensors whole."""
    if not exchange.is_sharded:
        return tensor.clone()
    rows = exchange.rows(len(tensor))[exchange.rank]
    return tensor[rows.start : rows.stop].clone()


def pieces(tensors: Mapping[str, Tensor], exchange: Exchange) -> dict[str, Tensor]:
    return {name: piece(tensor, exchange) for name, tensor in tensors.items()}
