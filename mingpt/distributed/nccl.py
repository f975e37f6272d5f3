"""NCCL's collectives as its watchdog sees them: which one waits, since when, and whether one has failed.

The main thread waits for them in a CUDA synchronisation, which has no time limit and raises no error of
NCCL's. The watchdog, a thread of torch's, can only end the process by SIGABRT, minutes later.
"""

import json
import os
import time
from datetime import timedelta

import torch
from torch import distributed
from torch._C import _distributed_c10d

ENVIRONMENT = {
    # Otherwise an error leaves a signal in the agent's store, which ends all later generations.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_TIMING": "1",  # the watchdog then sees when the GPU has reached a collective
}
# torch counts a collective's time from its call, when the GPU may have much to compute before it. So torch's
# own limit is only for a process in which nothing else acts.
SLACK = 10


def configure() -> None:
    """Set what torch's NCCL backend reads in the environment, apart from variables that are set already."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


class NcclWatch:
    """Tells another thread whether the GPUs' collectives fail, or wait for a peer."""

    def __init__(self, timeout_s: float) -> None:
        cuda = torch.device("cuda")
        assert distributed.group.WORLD is not None
        self.backend = distributed.group.WORLD._get_backend(cuda)
        self.backend._set_default_timeout(timedelta(seconds=SLACK * timeout_s))
        self.connects_since: float | None = None
        self.waiting: dict[str, tuple[int, float]] = {}  # process group -> (collective, first seen waiting)
        self.waited_s()  # raises here if this torch does not tell

    def connect(self, device: torch.device) -> None:
        """Connect the GPUs of all ranks by a first collective. Raises NCCL's errors. Collective."""
        self.connects_since = time.monotonic()
        distributed.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize()
        self.connects_since = None

    def has_failed(self) -> bool:
        """Return whether NCCL has failed: a peer is gone, or the network."""
        return self.backend.get_error() == _distributed_c10d.ErrorType.COMM_ERROR

    def waited_s(self) -> float:
        """Return for how long a collective on the GPU has waited for a peer; 0.0 if none does.

        What the GPU computes before the collective does not count. Only one thread may call this; a wait is
        noticed by two calls, and counts from the first.
        """
        now = time.monotonic()
        told = json.loads(_distributed_c10d._dump_nccl_trace_json(False, False))  # type: ignore[attr-defined]
        before, self.waiting = self.waiting, {}
        for name, status in told.get("pg_status", {}).items():
            number = int(status["last_started_collective"])
            if number > int(status["last_completed_collective"]):
                last, since = before.get(name, (number, now))
                self.waiting[name] = (number, since if number == last else now)
        since_all = [since for _, since in self.waiting.values()]
        return now - min([*since_all, self.connects_since or now])
