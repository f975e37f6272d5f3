import os
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError

from mingpt.distributed.exit import MAX_STACK_FILES, ProcessExit, is_lost_peer
from mingpt.distributed.launch import Launch
from mingpt.distributed.rendezvous import LOST_PEER, stuck_place


@pytest.mark.parametrize(
    ("module", "error", "is_loss"),
    [
        ("torch.distributed.distributed_c10d", RuntimeError("anything"), True),
        ("torch.distributed.fsdp", torch.OutOfMemoryError("Connection closed by peer"), False),
        ("torch.distributed.distributed_c10d", ValueError("Connection closed by peer"), False),
        ("mingpt.distributed.context", DistNetworkError("anything"), True),
        (
            "mingpt.distributed.nccl",
            DistBackendError(
                "NCCL error in: a.cpp:9, remote process exited or "
                "there was a network error, NCCL version 2.30.7"
            ),
            True,
        ),
        ("mingpt.distributed.nccl", DistBackendError("NCCL error in: a.cpp:9, invalid usage"), False),
        ("mingpt.training.trainer", RuntimeError("gloo: Connection closed, Connection reset by peer"), False),
        ("torch.nn.functional", RuntimeError("Connection closed by peer [127.0.0.1]:27271"), False),
    ],
)
def test_a_lost_peer_is_told_by_the_type_and_the_place_of_an_error_not_by_its_words(
    module: str, error: Exception, is_loss: bool
) -> None:
    with pytest.raises(type(error)) as raised:
        exec("raise error", {"__name__": module, "error": error})
    assert is_lost_peer(raised.value) == is_loss


def test_a_peer_that_does_not_come_is_a_lost_peer() -> None:
    with pytest.raises(RuntimeError) as raised:
        dist.init_process_group(
            "gloo", store=dist.HashStore(), rank=0, world_size=2, timeout=timedelta(seconds=0.5)
        )
    assert is_lost_peer(raised.value)


def test_stacks_of_the_present_generation_are_never_removed(tmp_path: Path) -> None:
    """Its workers have their files open, and others may have opened theirs first."""
    folder = tmp_path / "stacks"
    folder.mkdir()
    for rank in range(MAX_STACK_FILES + 5):
        (folder / f"worker-{rank}-present1.txt").write_text("" if rank % 2 else "stacks")
        for generation in ("earlier1", "earlier2"):
            (folder / f"worker-{rank}-{generation}.txt").write_text("stacks" if rank < 5 else "")
    os.utime(folder / "worker-0-earlier1.txt", (0, 0))
    rendezvous: Any = SimpleNamespace(generation="present1-and-more", local_peer_pidfds={})
    process_exit = ProcessExit(Launch(rank=3, world_size=MAX_STACK_FILES + 5))
    process_exit.join(rendezvous, timeout_s=60.0)
    process_exit.open_stacks(str(tmp_path), is_kept=True)
    left = sorted(path.name for path in folder.iterdir())
    assert len([name for name in left if "present1" in name]) == MAX_STACK_FILES + 5
    assert "worker-0-earlier1.txt" not in left and not any("-19-earlier" in name for name in left)
    assert process_exit.stacks is not None
    process_exit.stacks.close()


def test_the_place_where_a_worker_is_stuck_is_not_taken_from_stacks_that_a_user_asked_for(
    tmp_path: Path,
) -> None:
    thread = 'hread 0x00007f (most recent call first):\n  File "/home/me/{}.py", line 7 in step\n'
    path = tmp_path / "worker-1-present1.txt"
    path.write_text("Current t" + thread.format("asked"))
    assert stuck_place(path) == "it wrote no stacks (stopped, or its machine is lost)"
    path.write_text(path.read_text() + "Timeout (0:00:06)!\nT" + thread.format("trainer"))
    assert stuck_place(path).startswith("trainer.py:7 in step")


@pytest.mark.parametrize(
    ("other", "says"),
    [({"why": f"{LOST_PEER} (refused)"}, True), ({"why": "failed (OSError)"}, False), (None, False)],
)
def test_workers_that_all_lost_a_peer_say_what_the_backend_said_once(
    other: dict[str, str] | None, says: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under plain python: of a killed worker the agent tells, and a worker that failed has told it."""
    rendezvous: Any = SimpleNamespace(local_peer_pidfds={}, read_exit_reason=lambda rank: (True, other))
    for rank in (0, 1):
        process_exit = ProcessExit(Launch(rank=rank, world_size=2, status_file=tmp_path / "status"))
        process_exit.join(rendezvous, timeout_s=60.0)
        process_exit.report_lost_peer("the backend's words")
    what = "worker 0 lost a peer after step 0, and no restart is left (trainer.max_restarts)"
    assert capsys.readouterr().err == f"{what}: the backend's words\n" * says
