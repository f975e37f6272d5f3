import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistBackendError, DistNetworkError

from mingpt.base.errors import (
    ExpectedError,
    NodeRefused,
    NonRetryableError,
    PeersMissing,
    StopRequested,
    UserError,
)
from mingpt.distributed.exit import (
    MAX_STACK_FILES,
    ExitPlan,
    PeerLost,
    ProcessExit,
    SignalReceived,
    how_to_exit,
    is_lost_peer,
)
from mingpt.distributed.launch import Launch

Facts = dict[str, Any]


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
    rendezvous: Any = SimpleNamespace(generation="present1-and-more")
    process_exit = ProcessExit(Launch(rank=3, world_size=MAX_STACK_FILES + 5))
    process_exit.join(rendezvous, timeout_s=60.0)
    process_exit.start_run(tmp_path, lambda: 0, lambda why: None)
    left = sorted(path.name for path in folder.iterdir())
    assert len([name for name in left if "present1" in name]) == MAX_STACK_FILES + 5
    assert "worker-0-earlier1.txt" not in left and not any("-19-earlier" in name for name in left)
    assert process_exit.stacks is not None
    process_exit.stacks.close()


ORDERLY: Facts = {"is_orderly": True}
ENDED = ORDERLY | {"releases_claims": True}
TOLD = ORDERLY | {"reason": "told to stop by SIGTERM"}
BEFORE = "stopped by SIGTERM before the first step\n"
SAID: Facts = {"text": BEFORE, "status": f"0 {BEFORE}"}
ALONE: Facts = {"agent_pid": None, "world_size": 1, "local_world_size": 1}
LAST: Facts = {"restart_count": 1}
SECOND: Facts = {"rank": 1, "local_rank": 1}
PLAIN: Facts = {"status_file": Path("/tmp/mingpt-x/status")}
GONE: Facts = {"reason": "lost a peer (worker 1 vanished)"}
NOTED: Facts = {"failure": "worker 1 vanished"}
VANISHED = PeerLost("worker 1 vanished")
LINE = (
    "worker 0 lost a peer after step 7, and no restart is left (torchrun --max-restarts): worker 1 vanished\n"
)
WRONG, NAN = UserError("no such file"), NonRetryableError("not finite")
ABORTS = ORDERLY | {"reason": "ended the job (UserError: no such file)", "failure": "no such file"}
ENDS: Facts = {"ends_agent": True, "releases_claims": True}
NAN_REASON = "ended the job (NonRetryableError: not finite)"
NO_GPU = NodeRefused("no GPU here")
REFUSED = ORDERLY | {"reason": "ended the job (NodeRefused: no GPU here)", "failure": "no GPU here"}
IMPORT = ModuleNotFoundError("no numpy")
EARLY: Facts = {"has_met": False}
NO_IMPORT: Facts = {
    "reason": "failed (ModuleNotFoundError: no numpy)",
    "text": "ModuleNotFoundError: no numpy\n",
}
FULL = ExpectedError("out of memory")
FAILS: Facts = {"reason": "failed (ExpectedError: out of memory)"}
SAYS: Facts = {"text": "error: worker 0: out of memory\n"}
LATE, LATE_PEERS = "timed out waiting for a peer after 60 s", range(2)
MISSING = PeersMissing("worker 1 did not reach the rendezvous", [1])
AGENT_LOST = "error: the agent (process 9) was lost after step 7\n"


@pytest.mark.parametrize(
    ("error", "launch", "known", "code", "expected"),
    [
        (None, {}, {}, 0, ENDED | {"status": "0 ", "reason": "finished"}),
        (StopRequested("STOP"), SECOND, {}, 0, ENDED | {"reason": "stopped by STOP"}),
        (StopRequested("SIGTERM"), {}, {}, 143, TOLD | {"status": "0 "}),
        (StopRequested("SIGTERM"), ALONE, {}, 0, ENDED | {"status": "0 ", "reason": "stopped by SIGTERM"}),
        (SignalReceived(signal.SIGTERM, True), {}, {}, 143, TOLD | {"status": f"0 {BEFORE}"}),
        (SignalReceived(signal.SIGTERM, True), ALONE, {}, 0, TOLD | SAID),
        (SignalReceived(signal.SIGTERM, True), SECOND, {}, 143, TOLD),
        (SignalReceived(signal.SIGTERM, False), ALONE, {}, 143, TOLD),
        (WRONG, {}, {}, 2, ABORTS | ENDS | {"status": "2 ", "text": "error: no such file\n"}),
        (WRONG, SECOND, {}, 2, ABORTS | {"awaits_agent": True}),
        (WRONG, {"rank": 2}, {}, 2, ABORTS | ENDS | {"status": "2 "}),
        (NO_GPU, {"rank": 2}, {}, 2, REFUSED | ENDS | {"status": "2 ", "text": "error: no GPU here\n"}),
        (IMPORT, SECOND, EARLY, 1, NO_IMPORT | {"ends_agent": True, "status": "1 "}),
        (IMPORT, SECOND, {}, 1, NO_IMPORT),
        (OSError("stale"), {}, EARLY, 1, {"reason": "failed (OSError: stale)", "text": "OSError: stale\n"}),
        (NAN, SECOND, {}, 1, ORDERLY | {"reason": NAN_REASON, "awaits_agent": True}),
        (MISSING, {}, EARLY, 1, {"text": f"{MISSING}\n", "kills": [1]}),
        (MISSING, {"rank": 2}, EARLY, 1, {"kills": [1]}),
        (FULL, {}, {}, 1, FAILS | SAYS),
        (FULL, LAST, {}, 1, FAILS | SAYS | {"failure": "ExpectedError: out of memory"}),
        (KeyError("a"), {}, {}, 1, {"reason": "failed (KeyError: 'a')", "text": "KeyError: 'a'\n"}),
        (VANISHED, {}, {}, 1, GONE),
        (VANISHED, LAST, {}, 1, GONE | NOTED | {"text": LINE}),
        (VANISHED, LAST | PLAIN, {}, 1, GONE | NOTED),
        (VANISHED, {}, {"timed_out": LATE}, 1, {"reason": LATE, "kills": LATE_PEERS}),
        (PeerLost(LATE), {}, {}, 1, {"reason": LATE, "kills": LATE_PEERS}),
        (FULL, PLAIN, {"is_orphan": True}, 1, {"text": AGENT_LOST, "removes": Path("/tmp/mingpt-x")}),
        (None, SECOND, {"is_orphan": True}, 1, {}),
    ],
)  # fmt: skip
def test_how_a_worker_exits(
    error: Exception | None, launch: Facts, known: Facts, code: int, expected: Facts
) -> None:
    """The worker is rank 0 of two under torchrun with a restart left, unless `launch` says otherwise."""
    usual: Facts = {"world_size": 2, "local_world_size": 2, "agent_pid": 9, "max_restarts": 1}
    assert how_to_exit(error, Launch(**usual | launch), 7, **known) == ExitPlan(code, **expected)
