import pytest

from mingpt.distributed import GenerationEnd
from mingpt.distributed.rendezvous import LOST_PEER, TOLD, PeerEnd, repeated_failure

FAILED = "failed (OSError: planted)"


def end(step: int = 0, began: bool = False, **whys: str) -> GenerationEnd:
    """Of two workers, r0 and r1; one without a reason was killed."""
    reasons = {int(rank[1:]): {"why": why, "step": step, "began": began} for rank, why in whys.items()}
    return GenerationEnd(2, reasons)


BAD = end(r0=LOST_PEER, r1=FAILED)


@pytest.mark.parametrize(
    ("ends", "is_repeated"),
    [
        ([BAD] * 3, True),
        ([end(r0=FAILED, r1=FAILED)] * 3, True),
        ([end(r0=f"{TOLD} by SIGTERM", r1=FAILED)] * 3, True),  # by the agent, because of the other
        ([BAD] * 2, False),
        ([BAD, end(r0=LOST_PEER), BAD], False),  # a kill in between
        ([BAD, end(r1=FAILED), BAD], False),  # killed while the other failed
        ([end(r0=LOST_PEER, r1=LOST_PEER)] * 3, False),
        ([BAD, end(step=4, r0=LOST_PEER, r1=FAILED), BAD], False),
        ([end(began=True, r0=LOST_PEER, r1=FAILED)] * 3, False),  # run.json tells of those
        ([end(r0=LOST_PEER), BAD, BAD, BAD], True),
    ],
)
def test_three_failures_before_the_first_step_are_one_sentence(
    ends: list[GenerationEnd], is_repeated: bool
) -> None:
    sentence = repeated_failure(ends)
    assert (sentence is not None) == is_repeated
    if sentence:
        assert "3 generations failed one after the other before the first step (worker" in sentence


def test_the_end_of_a_generation_survives_the_store() -> None:
    assert GenerationEnd.from_json(BAD.to_json()) == BAD


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


def test_orderly_reasons_make_a_sentence_too() -> None:
    assert end(r0="finished", r1="finished").sentence() == "the workers finished"
    assert end(r0="stopped by STOP", r1="stopped by STOP").sentence() == "the workers were stopped by STOP"
    assert end(r0="finished").sentence() == "worker 1 vanished"
