from torch.distributed import TCPStore

from mingpt.distributed import Launch
from mingpt.distributed.rendezvous import Rendezvous


def test_a_store_tells_only_of_the_generation_right_before() -> None:
    """The store lives in an agent that may have been away while another agent led the job."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = []
    for number in (1, 2, 4, 5):
        launch = Launch(
            master_addr="127.0.0.1", master_port=store.port, agent_hosts_store=True, rdzv_round=number
        )
        known.append(Rendezvous(launch, timeout_s=10).previous_generation is not None)
    assert known == [False, True, False, True]
