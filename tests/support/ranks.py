"""Runs ranks as threads of this process, which exchange Python objects."""

import platform
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.distributed import DistributedContext, Group, Launch, Place
from mingpt.distributed.transport import Transport

T = TypeVar("T")
HOST = platform.node()


class ThreadTransport(Transport):
    def __init__(self, context: DistributedContext) -> None:
        super().__init__(context.rank, context.world_size)
        self.context = context

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.context.all_gather_object(tensor.clone())[source])

    def all_to_all(self, pieces: list[Tensor], send: list[int], receive: list[int]) -> Tensor:
        chunks = [parts[self.rank] for parts in self.context.all_gather_object(torch.cat(pieces).split(send))]
        assert [len(chunk) for chunk in chunks] == receive
        return torch.cat(chunks)

    def all_gather_parts(
        self, pieces: list[Tensor], sizes: list[int], at_once: bool = False
    ) -> Iterator[Tensor]:
        parts = self.context.all_gather_object(torch.cat(pieces))
        assert [len(part) for part in parts] == sizes
        yield from parts


class ThreadContext(DistributedContext):
    """The context of one rank, on a node of its own. `board` has a place per rank for exchanged values."""

    def __init__(self, rank: int, world_size: int, barrier: threading.Barrier, board: list[Any]) -> None:
        self.launch = Launch(rank=rank, world_size=world_size, node_rank=rank, local_rank=0)
        Group.__init__(self, rank, world_size)
        self.places = [Place(other, 0, HOST) for other in range(world_size)]
        self.barrier, self.board = barrier, board
        self.transport = ThreadTransport(self)

    def all_gather_object(self, value: T) -> list[T]:
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    fail_beside_work = Group.fail_beside_work  # which does not exit


def run_ranks(world_size: int, work: Callable[[DistributedContext], T]) -> list[T | Exception]:
    barrier, board = threading.Barrier(world_size, timeout=30), [None] * world_size
    with ThreadPoolExecutor(world_size) as threads:
        contexts = [ThreadContext(rank, world_size, barrier, board) for rank in range(world_size)]
        futures: list[Any] = [threads.submit(work, context) for context in contexts]
    return [future.exception() or future.result() for future in futures]


def results_of_threads(world_size: int, work: Callable[[DistributedContext], T]) -> list[T]:
    results: list[Any] = run_ranks(world_size, work)
    errors = [result for result in results if isinstance(result, BaseException)]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return results
