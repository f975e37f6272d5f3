"""The torchrun commands and environments with which plan, verify, tests and benchmarks start jobs."""

import os
import re
import sys
from collections.abc import Sequence

from mingpt.base.system import LOOPBACK
from mingpt.config.settings import ROOT as ROOT


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment for an independent job: this process's variables, and those in `more`.

    This process's OMP_NUM_THREADS, RANK, WORLD_SIZE, LOCAL_RANK, TORCHELASTIC_*, ANYNODE_* and MINGPT_* are
    left out, because a launcher or this program sets them for a worker.
    """
    dropped = re.compile("OMP_NUM_THREADS|RANK|WORLD_SIZE|LOCAL_RANK|(TORCHELASTIC|ANYNODE|MINGPT)_.*")
    return {name: value for name, value in os.environ.items() if not dropped.fullmatch(name)} | more


def torchrun(workers: int, restarts: int = 0, options: Sequence[str] = ()) -> list[str]:
    """Return a torchrun command that starts `workers` ranks per node; the caller appends the program.

    torchrun restarts the ranks after at most `restarts` failures. `options` are torchrun's options for nodes
    and rendezvous. By default they do what `--standalone` does, but do not resolve this host's name.
    """
    one_node = (
        "--nnodes=1",
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint={LOOPBACK}:0",
        f"--local_addr={LOOPBACK}",
    )
    command = [sys.executable, "-m", "torch.distributed.run", *(options or one_node)]
    return [*command, f"--nproc_per_node={workers}", f"--max-restarts={restarts}"]
