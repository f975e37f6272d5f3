"""Runs ranks as forks of this process, so that none has to import torch. They exchange tensors by gloo."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from mingpt.distributed import DistributedContext, Group, Launch, Place
from mingpt.distributed.transport import Transport, make_connector

T = TypeVar("T")
TIMEOUT_S = 60.0


class ForkedContext(DistributedContext):
    """The context of a rank. With several ranks, the process group must exist already."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.launch = Launch(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr="localhost" if world_size > 1 else None,
        )
        signals: Any = SimpleNamespace(reason=None, deferred=False)
        Group.__init__(self, rank, world_size, signals)
        self.places = [Place(0, other, "localhost") for other in range(world_size)]
        self.device, self.threads, self.dtype = torch.device("cpu"), 1, torch.float32
        self.rendezvous, self.transport = None, Transport(rank, world_size)
        self.exit: Any = SimpleNamespace(note_progress=lambda: None)


def share_memory(context: DistributedContext, timeout_s: float = TIMEOUT_S) -> Transport:
    """Give the context the transport that a worker would use. Collective."""
    connector = make_connector("cpu", context.world_size)
    addresses = context.all_gather_object(connector.address)
    context.transport = connector.connect(context, addresses, timeout_s)
    return context.transport


def fork_ranks(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T | Exception | None]:
    """Return, by rank, what `work` returned or raised in a fork; None: the rank died."""
    forks, deadline = multiprocessing.get_context("fork"), time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        ranks = range(world_size)
        processes = [forks.Process(target=run_rank, args=(folder, rank, world_size, work)) for rank in ranks]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    raise TimeoutError("a rank has not ended in time")
        finally:
            for process in processes:
                process.kill()
                process.join()
        results = [Path(folder, f"result-{rank}") for rank in ranks]
        return [pickle.loads(path.read_bytes()) if path.exists() else None for path in results]


def results_of(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    values: list[T] = []
    for result in fork_ranks(world_size, work, timeout_s):
        if isinstance(result, Exception):
            raise result
        assert result is not None, "a rank died"
        values.append(result)
    return values


def run_rank(folder: str, rank: int, world_size: int, work: Callable[[DistributedContext], Any]) -> None:
    try:
        torch.set_num_threads(1)
        if world_size > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
            )
        result = work(ForkedContext(rank, world_size))
    except Exception as error:
        traceback.print_exc()
        result = error
    Path(folder, f"result-{rank}").write_bytes(pickle.dumps(result))
    os._exit(0)


class SingleProcess(ForkedContext):
    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)
