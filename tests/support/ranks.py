"""Runs ranks as threads of this process, which exchange Python objects."""

import platform
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.distributed import DistributedContext, Group, Launch, Place
from mingpt.distributed.transport import Transport

T = TypeVar("T")
HOST = platform.node()


class ThreadTransport(Transport):
    """The transport of one rank: tensors travel as objects, by the context's `all_gather_object`."""

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
    """The context of one rank. With `one_node`, all ranks are on one node; else each rank has its own node.

    All ranks share `barrier` and `board`, a list with one place per rank for the values they exchange.
    """

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
        self.transport = ThreadTransport(self)

    def all_gather_object(self, value: T) -> list[T]:
        self.board[self.rank] = value
        self.barrier.wait()
        values = list(self.board)
        self.barrier.wait()
        return values

    fail_beside_work = Group.fail_beside_work  # which does not exit


def run_ranks(
    world_size: int, work: Callable[[DistributedContext], T], round: int | None = None, one_node: bool = False
) -> list[T | Exception]:
    """Run `work` on `world_size` threads; return, by rank, what it returned or raised."""
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
