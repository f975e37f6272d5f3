"""Errors of ExactHook; tests/parallel/test_strategies.py compares its sums."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mingpt.extras.ddp_hook import ExactHook


@pytest.fixture
def ddp() -> Iterator[DistributedDataParallel]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(2, 1))
    dist.destroy_process_group()


def test_a_step_with_too_few_backward_passes_is_an_error(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(ExactHook(ddp, 2), ExactHook.reduce)
    with pytest.raises(ValueError, match=r"rank 0 made \{1\} backward passes .* of 2 micro-batches is 2"):
        ddp(torch.ones(1, 2)).sum().backward()


def test_a_hook_that_could_only_hang_is_refused(ddp: DistributedDataParallel) -> None:
    """With too few micro-batches a worker would have none, and DDP would never call its hook."""
    unused = DistributedDataParallel(nn.Linear(2, 1), find_unused_parameters=True)
    frozen = DistributedDataParallel(nn.Linear(2, 1))
    frozen.requires_grad_(False)
    for model, micro_batches in ((ddp, 0), (unused, 2), (frozen, 2)):
        with pytest.raises(ValueError, match="need at least as many micro-batches"):
            ExactHook(model, micro_batches)
