import json
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import distributed
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from mingpt.base.errors import UserError
from mingpt.distributed.exit import NCCL_LOST
from mingpt.distributed.nccl import NcclWatch


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """What torch tells of a process group's collectives, by their numbers, for the test to change."""
    status = {"last_started_collective": -1, "last_completed_collective": -1}
    group = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(_set_default_timeout=lambda _: None))
    monkeypatch.setattr(distributed_c10d, "_get_default_group", lambda: group)
    answer = {"pg_status": {"0": status, "1": dict(status)}}
    monkeypatch.setattr(
        _distributed_c10d, "_dump_nccl_trace_json", lambda *_: json.dumps(answer), raising=False
    )
    return status


def test_a_wait_begins_when_the_gpu_reaches_a_collective_and_ends_with_it(status: dict[str, int]) -> None:
    """A GPU that computes for long does not wait, and two collectives are not one wait."""
    watch = NcclWatch(timeout_s=10.0)
    for started, completed, waits in [(4, 4, False), (5, 4, True), (6, 5, True), (7, 7, False)]:
        status |= {"last_started_collective": started, "last_completed_collective": completed}
        assert watch.waited_s() < 0.05
        time.sleep(0.1)
        assert (watch.waited_s() > 0.05) == waits


@pytest.mark.parametrize("is_lost", [True, False])
def test_gpus_that_cannot_be_connected_are_one_sentence_unless_a_peer_is_lost(
    is_lost: bool, status: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = distributed.DistError(f"NCCL error: {NCCL_LOST if is_lost else 'no room in /dev/shm'}")
    monkeypatch.setattr(distributed, "all_reduce", Mock(side_effect=error))
    watch = NcclWatch(timeout_s=10.0)
    with nullcontext() if is_lost else pytest.raises(UserError, match=r"cannot connect .*no room"):
        assert watch.connect(torch.device("cpu")) is error
