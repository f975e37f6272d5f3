"""Start a function on several ranks of this machine, in a gloo process group, and collect its results.

The lessons of the tutorial write this out, because they teach it. The mistakes are short, and share it.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_on_ranks(function: Callable[..., Any], *arguments: Any, world_size: int = 2) -> list[Any]:
    """What `function(rank, *arguments)` returns on each rank, in the order of ranks.

    The function must be one that a new process can import by name. Raises ProcessRaisedException if a rank
    raises.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(start, (world_size, folder, function, arguments), nprocs=world_size)
        return [torch.load(f"{folder}/result-{rank}", weights_only=False) for rank in range(world_size)]


def start(
    rank: int, world_size: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    store = f"file://{Path(folder).absolute()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    torch.save(function(rank, *arguments), f"{folder}/result-{rank}")
    dist.barrier()  # until then others may still need this rank
    sys.stdout.flush()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb
