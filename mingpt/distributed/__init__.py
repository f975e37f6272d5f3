"""What a worker process does besides training: rendezvous, collectives, requests to stop, and exit codes.

A generation is the workers from one start or restart to the next; ends.py says in words how a generation
ended. transport.py decides how tensors travel among ranks: by gloo, by NCCL, or by a faster transport
(mingpt/extras/).

Importing this package does not import torch, nor does constructing a `Worker`. `StopSignal` (stops.py) is for
loops without a Worker.
"""

from mingpt.distributed.context import DistributedContext, Place
from mingpt.distributed.device import enable_determinism
from mingpt.distributed.ends import GenerationEnd
from mingpt.distributed.exit import ProcessExit, write_stderr
from mingpt.distributed.group import Group
from mingpt.distributed.launch import Launch
from mingpt.distributed.stops import StopSignal
from mingpt.distributed.worker import Worker

__all__ = [
    "DistributedContext",
    "GenerationEnd",
    "Group",
    "Launch",
    "Place",
    "ProcessExit",
    "StopSignal",
    "Worker",
    "enable_determinism",
    "write_stderr",
]
