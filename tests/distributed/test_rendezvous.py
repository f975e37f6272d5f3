import pytest
from torch.distributed import TCPStore

from mingpt.distributed import GenerationEnd, Launch
from mingpt.distributed.rendezvous import LOST_PEER, TIMED_OUT, Rendezvous

NO_PEER = f"{LOST_PEER} (Connection closed by peer)"
FAILED = "failed (ValueError: no such thing)"
TOLD = "told to stop by SIGTERM"


def make_end(world_size: int, whys: dict[int, str]) -> GenerationEnd:
    return GenerationEnd(world_size, {rank: {"why": why, "step": 10 + rank} for rank, why in whys.items()})


@pytest.mark.parametrize(
    ("whys", "sentence"),
    [
        ({0: NO_PEER, 2: NO_PEER}, "worker 1 vanished"),
        ({0: NO_PEER}, "workers 1, 2 vanished"),
        ({}, "workers 0, 1, 2 vanished"),
        ({0: f"{TIMED_OUT} after 60 s", 2: NO_PEER}, "worker 1 timed out after 60 s"),
        ({0: NO_PEER, 1: f"{TIMED_OUT} after 2.5 s"}, "worker 2 timed out after 2.5 s"),
        ({0: f"{TIMED_OUT} after 60 s"}, "workers 1, 2 timed out after 60 s"),
        ({0: NO_PEER, 1: FAILED, 2: NO_PEER}, f"worker 1 {FAILED}"),
        ({0: FAILED, 1: FAILED, 2: NO_PEER}, f"worker 0 {FAILED}; worker 1 {FAILED}"),
        ({0: TOLD, 1: TOLD, 2: TOLD}, "the workers were told to stop by SIGTERM"),
        ({0: NO_PEER, 1: NO_PEER, 2: LOST_PEER}, "the workers lost a peer (Connection closed by peer)"),
    ],
)
def test_the_end_of_a_generation_is_one_sentence(whys: dict[int, str], sentence: str) -> None:
    assert make_end(3, whys).sentence() == sentence


def test_different_reasons_are_all_named() -> None:
    sentence = make_end(2, {0: TOLD, 1: NO_PEER}).sentence()
    assert sentence == f"the workers {NO_PEER}; the workers were told to stop by SIGTERM"


def test_the_last_step_is_the_furthest_that_any_rank_has_reported() -> None:
    assert make_end(3, {0: NO_PEER, 1: NO_PEER}).step() == 11
    assert make_end(3, {}).step() is None


def test_a_store_tells_only_of_the_generation_right_before() -> None:
    """It lives in an agent that may have been away while another one led the job."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = []
    for round in (1, 2, 4, 5):
        launch = Launch(master_addr="127.0.0.1", master_port=store.port, agent_hosts_store=True, round=round)
        known.append(Rendezvous(launch, timeout_s=10).previous_generation is not None)
    assert known == [False, True, False, True]
