import pytest
from torch.distributed import TCPStore

from mingpt.distributed import GenerationEnd, Launch
from mingpt.distributed.rendezvous import (
    LOST_PEER,
    MAX_REPEATS,
    TIMED_OUT,
    TOLD,
    FailedStarts,
    PeerEnd,
    Rendezvous,
)

FAILED = "failed (OSError: planted)"
NO_PEER = f"{LOST_PEER} (Connection closed by peer)"


def end(step: int = 0, began: bool = False, **whys: str) -> GenerationEnd:
    """The end of a generation of two workers, r0 and r1; a worker without a reason was killed."""
    reasons = {int(rank[1:]): {"why": why, "step": step, "began": began} for rank, why in whys.items()}
    return GenerationEnd(2, reasons)


BAD = end(r0=LOST_PEER, r1=FAILED)


@pytest.mark.parametrize(
    ("ends", "is_repeated"),
    [
        ([BAD] * 3, True),
        ([end(r0=FAILED, r1=FAILED)] * 3, True),
        ([end(r0=f"{TOLD} by SIGTERM", r1=FAILED)] * 3, True),  # by the agent, as the other failed
        ([BAD] * 2, False),
        ([BAD, end(r0=LOST_PEER), BAD], False),  # a kill in between
        ([BAD, end(r1=FAILED), BAD], False),  # killed while the other failed
        ([end(r0=LOST_PEER, r1=LOST_PEER)] * 3, True),  # all are there, but cannot be connected
        ([end(r0=LOST_PEER, r1=f"{TIMED_OUT} 9 s")] * 3, True),
        ([end(r0=LOST_PEER)] * 3, False),  # worker 1 was killed
        ([BAD, end(step=4, r0=LOST_PEER, r1=FAILED), BAD], False),
        ([end(began=True, r0=LOST_PEER, r1=FAILED)] * 3, False),  # run.json records such failures
        ([end(r0=LOST_PEER), BAD, BAD, BAD], True),
    ],
)
def test_failures_before_the_first_step_are_counted_while_they_are_the_same(
    ends: list[GenerationEnd], is_repeated: bool
) -> None:
    failed = FailedStarts()
    for one in ends:
        failed = failed.followed_by(one)
    assert (failed.number >= MAX_REPEATS) == is_repeated


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, PeerEnd.LOST),
        ({"why": FAILED, "agreed": False}, PeerEnd.LOST),
        ({"why": LOST_PEER, "agreed": False}, PeerEnd.LOST),
        ({"why": f"{TOLD} by SIGTERM", "agreed": False}, PeerEnd.STOPPED),
        ({"why": f"{TOLD} by SIGTERM", "agreed": True}, PeerEnd.AGREED),
        ({"why": "finished", "agreed": True}, PeerEnd.AGREED),
    ],
)
def test_a_peer_that_left_no_orderly_reason_is_lost(
    reason: dict[str, object] | None, expected: PeerEnd
) -> None:
    assert PeerEnd.of(reason) == expected


@pytest.mark.parametrize(
    ("whys", "sentence"),
    [
        ({}, "workers 0, 1 vanished"),
        ({"r0": NO_PEER}, "worker 1 vanished"),
        ({"r0": "finished"}, "worker 1 vanished"),
        ({"r0": f"{TIMED_OUT} 2.5 s"}, "worker 1 did not answer for 2.5 s"),
        ({"r0": NO_PEER, "r1": FAILED}, f"worker 1 {FAILED}"),
        ({"r0": FAILED, "r1": FAILED}, f"worker 0 {FAILED}; worker 1 {FAILED}"),
        (
            {"r0": f"{TOLD} by SIGTERM", "r1": NO_PEER},
            f"the workers {NO_PEER}; the workers were told to stop by SIGTERM",
        ),
        ({"r0": NO_PEER, "r1": LOST_PEER}, "the workers lost a peer (Connection closed by peer)"),
        ({"r0": "finished", "r1": "finished"}, "the workers finished"),
        ({"r0": "stopped by STOP", "r1": "stopped by STOP"}, "the workers were stopped by STOP"),
    ],
)
def test_the_end_of_a_generation_is_one_sentence(whys: dict[str, str], sentence: str) -> None:
    assert end(0, False, **whys).sentence() == sentence


def test_the_last_step_is_the_furthest_that_any_rank_has_reported() -> None:
    reasons = {rank: {"why": NO_PEER, "step": 10 + rank} for rank in (0, 1)}
    assert GenerationEnd(3, reasons).step() == 11
    assert GenerationEnd(3, {}).step() is None


def test_a_store_tells_only_of_the_generation_right_before() -> None:
    """The store lives in an agent that may have been away while another agent led the job."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = []
    for round in (1, 2, 4, 5):
        launch = Launch(master_addr="127.0.0.1", master_port=store.port, agent_hosts_store=True, round=round)
        known.append(Rendezvous(launch, timeout_s=10).previous_generation is not None)
    assert known == [False, True, False, True]


def test_the_third_failed_start_is_one_sentence_that_tells_the_last_failure() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = []
    for _ in range(MAX_REPEATS + 1):
        launch = Launch(master_addr="127.0.0.1", master_port=store.port, agent_hosts_store=True)
        rendezvous = Rendezvous(launch, timeout_s=10)
        rendezvous.record_exit_reason(FAILED, 0, 0)
        told.append(rendezvous.repeated_failure)
    assert told[:-1] == [None] * MAX_REPEATS
    assert told[-1] is not None and f"before the first step (worker 0 {FAILED})" in told[-1]
