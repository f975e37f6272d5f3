import pytest
from torch.distributed import TCPStore

from mingpt.distributed import GenerationEnd, Launch
from mingpt.distributed.rendezvous import LOST_PEER, TIMED_OUT, TOLD, PeerEnd, Rendezvous

FAILED = "failed (OSError: planted)"
NO_PEER = f"{LOST_PEER} (Connection closed by peer)"


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
    reasons = {int(rank[1:]): {"why": why, "step": 0} for rank, why in whys.items()}
    assert GenerationEnd(2, reasons).sentence() == sentence


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
