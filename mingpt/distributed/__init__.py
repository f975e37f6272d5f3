"""The workers of a generation (between two restarts): rendezvous, collectives, requests to stop, and exit.

ends.py says in words how workers and generations ended. transport.py decides how tensors travel among ranks
(gloo, NCCL, or the memory of one machine, which shared_memory.py maps).

Importing this package does not import torch.
`Worker`, `Launch`, `StopSignal` (signals.py) and `ProcessExit` work without torch until there is a process
group; constructing a `DistributedContext` imports torch.
"""

from mingpt.distributed.context import DistributedContext, Place
from mingpt.distributed.device import enable_determinism
from mingpt.distributed.ends import GenerationEnd
from mingpt.distributed.exit import ProcessExit, write_stderr
from mingpt.distributed.group import Group
from mingpt.distributed.launch import Launch
from mingpt.distributed.worker import Worker

__all__ = [
    "DistributedContext",
    "GenerationEnd",
    "Group",
    "Launch",
    "Place",
    "ProcessExit",
    "Worker",
    "enable_determinism",
    "write_stderr",
]
