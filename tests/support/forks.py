"""Runs ranks as forks of this process, so that none has to import torch. They exchange tensors by gloo."""

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
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
    """Set the context's transport to the one that a worker would use; return the transport. Collective."""
    connector = make_connector("cpu", context.world_size)
    addresses = context.all_gather_object(connector.address)
    context.transport = connector.connect(context, addresses, timeout_s)
    return context.transport


def fork_ranks(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T | Exception | None]:
    """Run `work` in `world_size` forks; return, by rank, what it returned or raised (None: the rank died).

    Raises TimeoutError if a rank has sent no result after `timeout_s`.
    """
    forks, deadline = multiprocessing.get_context("fork"), time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory() as folder:
        processes, receivers = [], []
        for rank in range(world_size):
            receiver, sender = forks.Pipe(duplex=False)
            process = forks.Process(target=run_rank, args=(sender, folder, rank, world_size, work))
            process.start()
            sender.close()  # otherwise the end of the process would not be noticed
            processes.append(process)
            receivers.append(receiver)
        try:
            return [receive(receiver, deadline) for receiver in receivers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def receive(receiver: Connection, deadline: float) -> Any:
    """Return the object that a rank sends; None if the rank dies.

    Raises TimeoutError if neither has happened by `deadline`, a time of time.monotonic.
    """
    is_there = receiver.poll(max(0.0, deadline - time.monotonic()))
    if not is_there:
        raise TimeoutError("a rank has not ended in time")
    try:
        return pickle.loads(receiver.recv_bytes())
    except EOFError:
        return None


def results_of(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    """Run `work` in `world_size` forks; return, by rank, what it returned.

    Raises an exception that a rank has raised, AssertionError if a rank died or returned None, and
    TimeoutError as `fork_ranks` does.
    """
    values: list[T] = []
    for result in fork_ranks(world_size, work, timeout_s):
        if isinstance(result, Exception):
            raise result
        assert result is not None, "a rank died"
        values.append(result)
    return values


def run_rank(
    sender: Connection, folder: str, rank: int, world_size: int, work: Callable[[DistributedContext], Any]
) -> None:
    """In a fork, run `work`, send what it returns or raises, and end the process. Ranks meet in `folder`."""
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
    # Sent as bytes: for tensors, `send` would share memory, which ends with this process.
    sender.send_bytes(pickle.dumps(result))
    os._exit(0)
