import json
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._C import _distributed_c10d
from torch.distributed import DistBackendError, distributed_c10d

from mingpt.base.errors import UserError
from mingpt.distributed.nccl import NcclWatch

NCCL_ERROR = "NCCL error in: a.cpp:94, {}, NCCL version 2.30\nkind\nno room in /dev/shm"


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


@pytest.mark.usefixtures("status")
def test_an_error_of_nccls_own_is_told_by_its_last_line_and_a_lost_peer_is_none_of_those(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch, all_reduce = NcclWatch(timeout_s=10.0), Mock()
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    all_reduce.side_effect = DistBackendError(NCCL_ERROR.format("unhandled system error"))
    with pytest.raises(UserError, match=r"cannot connect its GPUs \(NCCL: no room in /dev/shm\)"):
        watch.connect(torch.device("cpu"))
    lost: Exception = DistBackendError(
        NCCL_ERROR.format("remote process exited or there was a network error")
    )
    all_reduce.side_effect = lost
    assert watch.connect(torch.device("cpu")) == lost
