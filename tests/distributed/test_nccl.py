import json
import time
from types import SimpleNamespace

import pytest
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

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
