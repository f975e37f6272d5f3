"""The workers of one generation: how they meet after a restart, what they agree on, how they exit.

`Launch`, `StopSignal` (signals.py) and `ProcessExit` work before torch is imported; `DistributedContext` needs it.
Importing this package does not import torch.
"""

from mingpt.distributed.context import DistributedContext
from mingpt.distributed.exit import ProcessExit, write_stderr
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import GenerationEnd

__all__ = [
    "DistributedContext",
    "GenerationEnd",
    "Launch",
    "ProcessExit",
    "write_stderr",
]
