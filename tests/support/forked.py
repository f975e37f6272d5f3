"""Runs programs of the tutorial in forks of a process that has imported torch: the import takes seconds."""

import functools
import multiprocessing
import os
import re
import runpy
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

from support.jobs import free_port
from support.pages import TIMEOUT_S, link_root, run_program

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.pipelining", "mingpt.data", "mingpt.model"]
)


def run_forked(command: str, folder: Path) -> str:
    """Run the module after -m in `command`, in `--nproc_per_node` forks (default 1); return their stdout."""
    link_root(folder)
    workers, deadline = re.search(r"--nproc_per_node=(\d+)", command), time.monotonic() + TIMEOUT_S
    size, port, words = int(workers[1]) if workers else 1, free_port(), command.partition(" -m ")[2].split()
    with tempfile.TemporaryDirectory() as output:
        given = (size, port, words, folder, output)
        forks = [FORKS.Process(target=become_worker, args=(rank, *given)) for rank in range(size)]
        for fork in forks:
            fork.start()
        for fork in forks:
            fork.join(max(0.0, deadline - time.monotonic()))
            fork.kill()
        printed, errors = (Path(output, name).read_text() for name in ("1", "2"))
    assert {fork.exitcode for fork in forks} == {0}, f"{command}\n{printed}\n{errors}"
    return printed


def become_worker(rank: int, size: int, port: int, words: list[str], folder: Path, output: str) -> None:
    """Run the module `words[0]` as torchrun would; the files `1` and `2` in `output` get its output."""
    os.chdir(folder)
    for descriptor in (1, 2):
        os.dup2(os.open(f"{output}/{descriptor}", os.O_CREAT | os.O_APPEND | os.O_WRONLY), descriptor)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.multiprocessing.spawn = functools.partial(  # which would import torch again
        torch.multiprocessing.start_processes, start_method="fork"
    )
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


# The ways in which a test can run a program: quickly, and once a week as the page says.
WAYS = [
    pytest.param(run_forked, id="forked"),
    pytest.param(run_program, id="as-on-the-page", marks=pytest.mark.weekly),
]
