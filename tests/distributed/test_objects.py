import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from mingpt.distributed.objects import HEAD_BYTES, gather_objects

WORKERS = 3


class Exchange:
    """all_gather among threads; counts the collectives."""

    def __init__(self) -> None:
        self.barrier, self.count = threading.Barrier(WORKERS, timeout=30), 0
        self.tensors = [torch.empty(0)] * WORKERS

    def gather(self, value: Any, rank: int) -> list[Any]:
        def all_gather(tensor: torch.Tensor) -> torch.Tensor:
            self.tensors[rank] = tensor
            self.barrier.wait()
            stacked = torch.stack(self.tensors)
            if self.barrier.wait() == 0:  # of one thread, after all have read the tensors
                self.count += 1
            return stacked

        return gather_objects(value, all_gather)


@pytest.mark.parametrize(
    ("values", "collectives"),
    [
        ([(True, None), "a", None], 1),
        ([b"\0" * 3, b"", {"a": [1.5, torch.float32]}], 1),
        (["short", "x" * 5000, b"y" * (HEAD_BYTES + 7)], 2),
        ([None, list(range(100_000)), None], 2),
    ],
)
def test_all_ranks_get_all_objects_and_small_ones_in_one_collective(
    values: list[Any], collectives: int
) -> None:
    exchange = Exchange()
    with ThreadPoolExecutor(WORKERS) as pool:
        gathered = list(pool.map(exchange.gather, values, range(WORKERS)))
    assert gathered == [values] * WORKERS
    assert exchange.count == collectives


@pytest.mark.parametrize("more", range(-3, 4))
def test_objects_at_the_border_of_one_collective(more: int) -> None:
    exchange = Exchange()
    values = [b"z" * (HEAD_BYTES - 30 + 5 * more), b"z" * (HEAD_BYTES - 23 + more), b""]
    with ThreadPoolExecutor(WORKERS) as pool:
        gathered = list(pool.map(exchange.gather, values, range(WORKERS)))
    assert gathered == [values] * WORKERS
