"""Several ranks in one process, as threads that exchange objects."""

import platform
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from mingpt.distributed import DistributedContext, Group, Launch, Place

T = TypeVar("T")
HOST = platform.node()


class ThreadContext(DistributedContext):
    """One rank of several. Each rank is alone on its node, unless all ranks are on one node."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        barrier: threading.Barrier,
        board: list[Any],
        rdzv_round: int | None,
        one_node: bool = False,
    ) -> None:
        node_rank, local_rank = (0, rank) if one_node else (rank, 0)
        self.launch = Launch(
            rank=rank,
            world_size=world_size,
            node_rank=node_rank,
            local_rank=local_rank,
            rdzv_round=rdzv_round,
        )
        Group.__init__(self, rank, world_size)
        self.places = [Place(0, r, HOST) if one_node else Place(r, 0, HOST) for r in range(world_size)]
        self.barrier, self.board = barrier, board

    def all_gather_object(self, value: T) -> list[T]:
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    def broadcast_object(self, value: T | None, source: int) -> T:
        return self.all_gather_object(value)[source]  # type: ignore[return-value]

    def broadcast(self, tensor: Tensor, source: int) -> None:
        tensor.copy_(self.all_gather_object(tensor.clone())[source])

    fail_beside_work = Group.fail_beside_work  # which does not exit


def run_ranks(
    world_size: int, work: Callable[[DistributedContext], T], round: int | None = None, one_node: bool = False
) -> list[T | Exception]:
    """The results of `work` by rank: what it returns or raises."""
    barrier, board = threading.Barrier(world_size, timeout=30), [None] * world_size
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadContext(rank, world_size, barrier, board, round, one_node))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def lone_rank(rank: int = 0, world_size: int = 1) -> DistributedContext:
    """A rank that meets no other rank: it is alone, or exchanges nothing."""
    return ThreadContext(rank, world_size, threading.Barrier(1), [None] * world_size, rdzv_round=None)
