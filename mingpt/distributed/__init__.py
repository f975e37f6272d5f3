"""The workers of one generation: rendezvous after a restart, collectives, requests to stop, and exit.

`Launch`, `StopSignal` (signals.py) and `ProcessExit` work before torch is imported; `DistributedContext`
needs it. Importing this package does not import torch.
"""

from mingpt.distributed.context import DistributedContext
from mingpt.distributed.exit import ProcessExit, write_stderr
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import GenerationEnd

__all__ = ["DistributedContext", "GenerationEnd", "Launch", "ProcessExit", "write_stderr"]
