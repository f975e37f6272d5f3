import faulthandler
import math
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.properties import examples
from torch.distributed import DistBackendError, DistNetworkError

from mingpt.base.errors import (
    ExpectedError,
    LaterGeneration,
    NodeRefused,
    NodesLeave,
    NonRetryableError,
    PeersMissing,
    StopRequested,
    SupersededError,
    UserError,
)
from mingpt.distributed.exit import ExitPlan, PeerLost, SignalReceived, StackFile, how_to_exit, is_lost_peer
from mingpt.distributed.launch import Launch
from mingpt.distributed.signals import REASONS, SIGNALS

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
        ("torch.autograd.graph", RuntimeError("[/a/gloo/tcp/pair.cc:553] Connection closed by peer"), True),
    ],
)
def test_a_lost_peer_is_told_by_the_type_and_the_place_of_an_error(
    module: str, error: Exception, is_loss: bool
) -> None:
    with pytest.raises(type(error)) as raised:
        exec("raise error", {"__name__": module, "error": error})
    assert is_lost_peer(raised.value) == is_loss


WRONG, FULL, VANISHED = (
    UserError("no such file"),
    ExpectedError("out of memory"),
    PeerLost("worker 1 vanished"),
)
AWAY = UserError("run_dir is away")
AWAY.may_pass = True
TOLD_FIRST = SignalReceived(signal.SIGTERM, True)
TOLD_EARLY = "told to stop by SIGTERM before the first step"
BEFORE = "stopped by SIGTERM before the first step: the same command goes on\n"
ALONE: Facts = {"agent_pid": None, "world_size": 1}
SECOND: Facts = {"rank": 1, "local_rank": 1}
PLAIN: Facts = {"has_own_agent": True}
EARLY: Facts = {"has_met": False}
LATE = "timed out waiting for a peer after 60 s"
ABORTS = "ended the job (UserError: no such file)"


def case(
    error: Exception | None, launch: Facts, known: Facts, code: int, reason: str = "", **plan: Any
) -> tuple[Exception | None, Facts, Facts, ExitPlan]:
    return error, launch, known, ExitPlan(code, reason=reason, **plan)


@pytest.mark.parametrize(
    ("error", "launch", "known", "plan"),
    [
        case(None, {}, {}, 0, "finished", job_code=0, releases_claims=True),
        case(StopRequested("STOP"), SECOND, {}, 0, "stopped by STOP", job_code=0, releases_claims=True),
        case(StopRequested("SIGTERM"), {}, {}, 143, "told to stop by SIGTERM", job_code=0),
        case(StopRequested("SIGTERM"), ALONE, {}, 0, "stopped by SIGTERM", job_code=0, releases_claims=True),
        case(TOLD_FIRST, {}, {}, 143, TOLD_EARLY, job_code=0),
        case(TOLD_FIRST, ALONE, {}, 0, TOLD_EARLY, text=BEFORE, job_code=0),
        case(TOLD_FIRST, SECOND, {}, 143, TOLD_EARLY, job_code=0),
        case(SignalReceived(signal.SIGTERM, False), ALONE, {}, 143, "told to stop by SIGTERM"),
        case(
            WRONG, {}, {}, 2, ABORTS, ends_agent=True, job_code=2, text="error: no such file\n",
            failure="no such file", releases_claims=True,
        ),
        case(
            WRONG, {"rank": 2}, {}, 2, ABORTS, ends_agent=True, job_code=2, failure="no such file",
            releases_claims=True,
        ),
        case(WRONG, SECOND, {}, 2, ABORTS, job_code=2, failure="no such file", waits_s=math.inf),
        case(
            AWAY, {}, {"is_restart": True}, 1, "failed (run_dir is away)", waits_s=30.0,
            text="error: run_dir is away; a restart follows in 30 s\n",
        ),
        case(AWAY, SECOND, {"is_restart": True}, 1, "failed (run_dir is away)", waits_s=30.0),
        case(
            AWAY, SECOND, {}, 2, "ended the job (UserError: run_dir is away)", failure="run_dir is away",
            job_code=2, waits_s=math.inf,
        ),
        case(
            AWAY, SECOND | {"restart_count": 1}, {"is_restart": True}, 2,
            "ended the job (UserError: run_dir is away)", failure="run_dir is away", job_code=2,
            waits_s=math.inf,
        ),
        case(
            NodeRefused("no GPU"), {"rank": 2}, {}, 2, "ended the job (NodeRefused: no GPU)", ends_agent=True,
            job_code=2, text="error: no GPU\n", failure="no GPU", releases_claims=True,
        ),
        case(
            NonRetryableError("not finite"), SECOND, {}, 1, "ended the job (NonRetryableError: not finite)",
            job_code=1, waits_s=math.inf,
        ),
        case(
            ImportError("torch"), SECOND, EARLY, 1, "failed (ImportError: torch)", ends_agent=True,
            text="ImportError: torch\n",
        ),
        case(ImportError("torch"), SECOND, {}, 1, "failed (ImportError: torch)", text="ImportError: torch\n"),
        case(OSError("stale"), {}, EARLY, 1, "failed (OSError: stale)", text="OSError: stale\n"),
        case(PeersMissing("worker 1 ...", [1]), {}, EARLY, 1, text="worker 1 ...\n", kills=[1]),
        case(PeersMissing("worker 1 ...", [1]), {"rank": 2}, EARLY, 1, kills=[1]),
        case(NodesLeave("without b", [1]), {}, {}, 1, kills=[1], waits_s=10.0),
        case(NodesLeave("without a", [0]), {"rank": 1}, {}, 1, text="without a\n", kills=[0], waits_s=10.0),
        case(
            FULL, {}, {}, 1, "failed (ExpectedError: out of memory)", text="error: worker 0: out of memory\n"
        ),
        case(
            FULL, {"restart_count": 1}, {}, 1, "failed (ExpectedError: out of memory)",
            text="error: worker 0: out of memory\n", failure="ExpectedError: out of memory",
        ),
        case(VANISHED, {}, {}, 1, "lost a peer (worker 1 vanished)"),
        case(
            VANISHED, {"restart_count": 1}, {}, 1, "lost a peer (worker 1 vanished)",
            text="worker 0 lost a peer after step 7, and no restart is left (torchrun --max-restarts): "
            "worker 1 vanished\n",
            failure="worker 1 vanished",
        ),
        case(
            VANISHED, PLAIN | {"restart_count": 1}, {}, 1, "lost a peer (worker 1 vanished)",
            failure="worker 1 vanished",
        ),
        case(VANISHED, {}, {"timed_out": LATE}, 1, "lost a peer (worker 1 vanished)"),  # a long step
        case(PeerLost(LATE), {}, {}, 1, LATE, kills=range(2)),
        case(
            FULL, PLAIN, {"is_orphan": True}, 1,
            text="error: the agent (process 9) was lost after step 7\n",
        ),
        case(None, SECOND, {"is_orphan": True}, 1),
    ],
)  # fmt: skip
def test_how_a_worker_exits(error: Exception | None, launch: Facts, known: Facts, plan: ExitPlan) -> None:
    """The worker is rank 0 of two under torchrun with a restart left, unless `launch` says otherwise."""
    usual: Facts = {"world_size": 2, "local_world_size": 2, "agent_pid": 9, "max_restarts": 1}
    assert how_to_exit(error, Launch(**usual | launch), 7, **known) == plan


KINDS: list[type[BaseException]] = [
    *(UserError, NodeRefused, ExpectedError, NonRetryableError, SupersededError, LaterGeneration, PeerLost),
    *(OSError, ImportError, RuntimeError, KeyError, MemoryError, DistNetworkError, KeyboardInterrupt),
]
TEXTS = st.sampled_from(["", "a text", "two\nlines", LATE])
ERRORS: st.SearchStrategy[BaseException | None] = st.one_of(
    st.none(),
    st.builds(StopRequested, st.sampled_from(REASONS)),
    st.builds(SignalReceived, st.sampled_from(SIGNALS), st.booleans()),
    st.sampled_from([PeersMissing, NodesLeave]).map(lambda kind: kind("worker 0 is missing", [0])),
    st.builds(lambda kind, text: kind(text), st.sampled_from(KINDS), TEXTS),
)


@st.composite
def jobs(draw: st.DrawFn) -> list[Launch]:
    """The workers of one or two nodes, alone or under a launcher with or without an agent."""
    nodes, local = draw(st.sampled_from([(1, 1), (1, 3), (2, 1), (2, 2)]))
    usual: Facts = {"world_size": nodes * local, "local_world_size": local, "max_restarts": 1}
    usual |= {"agent_pid": draw(st.sampled_from([None, 9])), "restart_count": draw(st.integers(0, 1))}
    usual["has_own_agent"] = usual["agent_pid"] is not None and nodes == 1 and draw(st.booleans())
    return [Launch(rank=rank, local_rank=rank % local, **usual) for rank in range(nodes * local)]


@examples(300)
@given(ERRORS, jobs(), st.sampled_from(["", LATE]), st.booleans(), st.booleans())
def test_every_error_has_one_exit_code_on_all_ranks_and_is_told_by_somebody(
    error: BaseException | None, job: list[Launch], late: str, has_met: bool, is_restart: bool
) -> None:
    if isinstance(error, PeersMissing):
        job = job[1:]
        assume(job)  # otherwise nobody is left
    plans = [how_to_exit(error, launch, 7, late, has_met, False, is_restart) for launch in job]
    (code,) = {plan.code for plan in plans}
    assert (code == 2) == isinstance(error, UserError) and (code in (0, 1, 2) or 128 < code < 160)
    texts = [plan.text for plan in plans if plan.text]
    assert all(text.endswith("\n") for text in texts)
    if isinstance(error, (UserError, ExpectedError)):
        assert "Traceback" not in "".join(texts)
    if type(error) is UserError and has_met:
        assert texts == [f"error: {error}\n"]
    # A lost peer is told by the agent, or by the next generation, if that knows of it.
    is_told_later = has_met and all(plan.reason for plan in plans) and error and is_lost_peer(error)
    assert code not in (1, 2) or texts or is_told_later
    for launch, plan in zip(job, plans, strict=True):
        if launch.agent_pid is None:
            assert not plan.ends_agent and plan.waits_s < math.inf, "nobody would end the wait"
        if plan.failure:
            assert isinstance(error, UserError) or not launch.has_restarts_left()


def test_a_process_on_a_machine_that_has_just_booted_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Linux time.monotonic counts from the start of the machine."""
    monkeypatch.setattr(time, "monotonic", lambda: 1.0)
    path = tmp_path / "stacks" / "0.txt"
    path.parent.mkdir()
    path.write_text("stacks of an earlier process")
    stacks = StackFile(path, 600.0)
    try:
        stacks.note_progress()
        assert stacks.armed_at == 1.0 and path.stat().st_size == 0
    finally:
        stacks.close()
        faulthandler.unregister(signal.SIGUSR2)
    assert not path.exists()
