"""Several ranks as forks of this process, which exchange tensors by gloo: one import of torch for all."""

import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from mingpt.distributed import DistributedContext, Launch

T = TypeVar("T")
TIMEOUT_S = 60.0


class ForkedContext(DistributedContext):
    """The context of a rank whose process group, if it is not alone, is there already."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.launch = Launch(
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr="localhost" if world_size > 1 else None,
        )
        self.rank, self.world_size = rank, world_size
        self.device, self.threads = torch.device("cpu"), 1
        self.rendezvous = self.memory = None
        self.agreed_stop = None
        signals: Any = SimpleNamespace(note_progress=lambda: None, reason=None, deferred=False)
        self.stop_signal = signals


def fork_ranks(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T | Exception | None]:
    """What `work` returns, or raises, on each rank; None for one that died.

    Raises TimeoutError if a rank does not end.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, pids = Path(name), []
        for rank in range(world_size):
            pid = os.fork()
            if not pid:
                run_rank(folder, rank, world_size, work)
            pids.append(pid)
        try:
            wait_for_all(pids, timeout_s)
        finally:
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                except (ProcessLookupError, ChildProcessError):
                    pass  # it has ended by itself
        return [read_result(folder / str(rank)) for rank in range(world_size)]


def results_of(
    world_size: int, work: Callable[[DistributedContext], T], timeout_s: float = TIMEOUT_S
) -> list[T]:
    """What `work` returns on each rank. Raises what one of them has raised."""
    values: list[T] = []
    for result in fork_ranks(world_size, work, timeout_s):
        if isinstance(result, Exception):
            raise result
        assert result is not None, "a rank died"
        values.append(result)
    return values


def wait_for_all(pids: list[int], timeout_s: float) -> None:
    """Until all have ended. Raises TimeoutError."""
    deadline, running = time.monotonic() + timeout_s, set(pids)
    while running:
        running -= {pid for pid in running if os.waitpid(pid, os.WNOHANG)[0]}
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(running)} of {len(pids)} ranks have not ended after {timeout_s} s")
        time.sleep(0.005)


def read_result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


def run_rank(folder: Path, rank: int, world_size: int, work: Callable[[DistributedContext], Any]) -> None:
    """In a fork, to the end of its process."""
    code = 1
    try:
        torch.set_num_threads(1)
        if world_size > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=world_size
            )
        result = outcome(work, ForkedContext(rank, world_size))
        path = folder / f"{rank}.new"
        path.write_bytes(pickle.dumps(result))
        path.rename(folder / str(rank))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def outcome(work: Callable[[DistributedContext], T], context: DistributedContext) -> T | Exception:
    try:
        return work(context)
    except Exception as error:
        traceback.print_exc()
        return error
