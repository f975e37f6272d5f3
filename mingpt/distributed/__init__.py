"""The workers of one generation: rendezvous after a restart, collectives, requests to stop, and exit.

`Launch`, `StopSignal` and `ProcessExit` work before torch is imported; `DistributedContext` needs it.
Importing this package does not import torch.
"""

from mingpt.distributed.context import DistributedContext
from mingpt.distributed.exit import ProcessExit, is_lost_peer, write_stderr
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import GenerationEnd
from mingpt.distributed.signals import StopSignal

__all__ = [
    "DistributedContext",
    "GenerationEnd",
    "Launch",
    "ProcessExit",
    "StopSignal",
    "is_lost_peer",
    "write_stderr",
]
