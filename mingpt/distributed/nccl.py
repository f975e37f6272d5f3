"""How long NCCL's collectives have waited for a peer, according to torch's watchdog thread.

The main thread waits for collectives in a CUDA synchronisation, which has no time limit and raises no NCCL
error. By default, the watchdog itself ends the process by SIGABRT, but much later.
"""

import json
import os
import platform
import time
from datetime import timedelta

import torch
from torch import distributed
from torch._C import _distributed_c10d

from mingpt.base.errors import UserError
from mingpt.distributed.exit import first_line, is_lost_peer

# torch's own limit for a collective is SLACK times timeout_s. It is for a process in which nothing else ends
# the wait. torch counts the time from the call, but before the collective the GPU may have much to do.
SLACK = 10


def set_defaults() -> None:
    """Set two of torch's environment variables for NCCL; a variable that the user has set stays as it is.

    Call this before init_process_group.
    """
    # torch's dump at a timeout would leave a key in the agent's TCPStore, which ends all later generations.
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_TIMING", "1")  # NcclWatch needs it


class NcclWatch:
    """Measures how long the GPUs' collectives have waited for a peer; `backend` is torch's NCCL backend.

    Construct it after init_process_group. The constructor sets the backend's timeout to SLACK * `timeout_s`.
    """

    def __init__(self, timeout_s: float) -> None:
        group = distributed.distributed_c10d._get_default_group()
        self.backend = group._get_backend(torch.device("cuda"))
        self.backend._set_default_timeout(timedelta(seconds=SLACK * timeout_s))
        self.connects = False
        self.waiting: list[str] = []  # names of the waiting collectives, the same ones since `since`
        self.since = time.monotonic()
        self.waited_s()  # raises here, not in a thread, if this torch does not tell what waits

    def connect(self, device: torch.device) -> Exception | None:
        """Connect the GPUs of all ranks with an all-reduce; return None if it succeeds. Collective.

        If a lost peer or the network causes an NCCL error, returns this error, because another rank may raise
        an error that says more. Raises UserError for any other NCCL error.
        """
        self.connects = True
        try:
            distributed.all_reduce(torch.zeros(1, device=device))
            torch.cuda.synchronize()
        except distributed.DistError as error:
            if is_lost_peer(error):
                return error
            raise UserError(
                f"{platform.node()} cannot connect its GPUs ({first_line(error)}): remove the cause, or set "
                "trainer.device=cpu"
            ) from None
        self.connects = False
        return None

    def waited_s(self) -> float:
        """Return for how many seconds the same collectives on the GPU, or `connect`, have waited for peers.

        Returns about 0 if no collective waits. The GPU's work before a collective does not count. Call this
        often, and from one thread only: the time counts from the first call that finds the same collectives
        waiting.
        """
        told = json.loads(_distributed_c10d._dump_nccl_trace_json(False, False))  # type: ignore[attr-defined]
        waiting = ["connect"] * self.connects + [
            f"{status['last_started_collective']} of process group {name}"
            for name, status in told.get("pg_status", {}).items()
            if int(status["last_started_collective"]) > int(status["last_completed_collective"])
        ]
        if waiting != self.waiting or not waiting:
            self.waiting, self.since = waiting, time.monotonic()
        return time.monotonic() - self.since
