"""Sentences from facts: each names the host, the cause and what to change; a healthy cluster gets none."""

from collections.abc import Mapping
from typing import Any

import pytest

from mingpt.tools.doctor.facts import Facts, find_faults

CONFIG = {"model.n_layer": 3, "optimizer.learning_rate": 0.007, "seed": 1}


def healthy(number: int) -> Facts:
    """Worker `number` - 1, alone on node `number`."""
    return {
        "rank": number - 1,
        "node": number - 1,
        "host": f"node{number}",
        "local_rank": 0,
        "torch": "2.13.0+cpu",
        "threads": 1,
        "device": "cpu AVX512",
        "device_type": "cpu",
        "config": dict(CONFIG),
        "networks": {"lo": "127.0.0.1/8", "eth0": f"10.0.0.{number}/24"},
        "address": f"10.0.0.{number}",
        "clock_s": 0.001,
        "all_reduce_mb_s": 900.0,
        "all_reduce_error": None,
    }


CLUSTER = [healthy(number) for number in (1, 2, 3)]
FIRST, SECOND, THIRD = CLUSTER
SILENT = "no answer within 3 s"


def only_fault(*workers: Facts) -> str:
    (fault,) = find_faults(workers)
    return fault


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"torch": "2.11.0"},
            ["node3 has torch 2.11.0 and the others 2.13.0+cpu", "pip install torch==2.13.0+cpu there"],
        ),
        ({"threads": 8}, ["node3 computes with 8 CPU threads", "OMP_NUM_THREADS=1"]),
        ({"device_type": "cuda"}, ["node3 computes on cuda and the others on cpu"]),
        ({"clock_s": -5.0}, ["the clock of node3 differs from the others' by -5.0 s"]),
        ({"device_error": "this machine has no GPU"}, ["node3: this machine has no GPU"]),
        ({"address_error": "ib0 names no interface"}, ["node3: ib0", "GLOO_SOCKET_IFNAME"]),
        ({"name_error": "its host name does not resolve"}, ["node3: its", "--local_addr=127.0.0.1"]),
        ({"all_reduce_error": "timed out"}, ["fails on node3 (timed out)", "MTU"]),
        ({"all_reduce_error": "NCCL: Duplicate GPU"}, ["fails on node3 (NCCL: Duplicate GPU): remove"]),
        ({"gpus_error": "node3 has GPUs for 1 of its 2 workers"}, ["node3 has GPUs for 1"]),
        (
            {"config": CONFIG | {"seed": 2, "optimizer.learning_rate": 0.1}},
            ["started with optimizer.learning_rate=0.1, the others with 0.007; seed=2, the others with 1"],
        ),
    ],
)
def test_a_node_that_differs_or_cannot_do_something_is_one_sentence(
    change: dict[str, Any], said: list[str]
) -> None:
    fault = only_fault(FIRST, SECOND, THIRD | change)
    for words in said:
        assert words in fault


def test_a_healthy_cluster_has_no_fault() -> None:
    assert find_faults(CLUSTER) == find_faults(CLUSTER[:1]) == []
    assert find_faults([FIRST, SECOND, THIRD | {"clock_s": 0.9}]) == []


def test_most_workers_decide_and_of_two_equal_halves_that_of_rank_0() -> None:
    assert only_fault(FIRST, SECOND | {"torch": "2.11.0"}).startswith("node2 has torch 2.11.0")
    behind = [FIRST, SECOND | {"clock_s": -5.0}, THIRD | {"clock_s": -5.2}]
    assert "the clock of node1 differs from the others' by +5.0 s" in only_fault(*behind)


def test_a_node_with_two_workers_is_one_fault_and_nodes_of_one_name_are_told_by_their_number() -> None:
    pair = [THIRD | {"rank": rank, "local_rank": rank - 2, "torch": "2.11.0"} for rank in (2, 3)]
    others = [FIRST | {"rank": 4, "local_rank": 1}, SECOND | {"rank": 5, "local_rank": 1}]
    workers = [FIRST, SECOND, *pair, *others]
    assert only_fault(*workers).startswith("node3 has torch")
    same = [worker | {"host": "vm"} for worker in workers]
    assert only_fault(*same).startswith("vm (node 2) has torch")


def test_a_worker_that_found_nothing_is_not_said_to_differ() -> None:
    silent = {
        "rank": 2,
        "node": 2,
        "host": "node3",
        "local_rank": 0,
        "unfinished": "it has stopped answering",
    }
    assert "stopped answering" in only_fault(FIRST, SECOND, silent)


def cluster(failed: Mapping[tuple[int, int], str], workers: list[Facts] = CLUSTER) -> list[Facts]:
    """The three nodes, on which connections from a rank to a rank failed."""
    return [
        worker
        | {"unreachable": [[to, why] for (source, to), why in failed.items() if source == worker["rank"]]}
        for worker in workers
    ]


def test_an_address_that_nobody_reaches_is_a_wrong_interface_and_one_that_is_routed_is_none() -> None:
    networks = THIRD["networks"] | {"eth1": "10.9.9.1/24"}
    moved = [FIRST, SECOND, THIRD | {"address": "10.9.9.1", "networks": networks}]
    assert find_faults(cluster({}, moved)) == []
    fault = only_fault(*cluster({(0, 2): SILENT, (1, 2): "no route to host"}, moved))
    assert "node3 listens on 10.9.9.1, interface eth1" in fault
    assert "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to eth0 on node3" in fault
    looped = [FIRST, SECOND | {"address": "127.0.1.1"}]
    fault = only_fault(*cluster({(0, 1): "connection refused"}, looped))
    assert "node2 listens on 127.0.1.1, interface lo" in fault and "to eth0 on node2" in fault


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (
            [(1, 2)],
            ["node2 cannot connect to node3 on 10.0.0.3 (no answer within 3 s): open the TCP ports 32768"],
        ),
        ([(1, 2), (2, 1)], ["node2 cannot connect to node3", "node3 cannot connect to node2"]),
        ([(0, 2), (1, 2)], ["all other nodes cannot connect to node3 on 10.0.0.3"]),
        ([(2, 0), (2, 1)], ["node3 cannot connect to node1 on", "node3 cannot connect to node2 on"]),
        ([(1, 2), (1, 3)], ["node2 cannot connect to node3"]),
    ],
)
def test_links_that_are_blocked_are_told_by_who_cannot_connect(
    links: list[tuple[int, int]], said: list[str]
) -> None:
    second = THIRD | {"rank": 3, "local_rank": 1}
    workers = [*CLUSTER, second] if (1, 3) in links else CLUSTER
    faults = find_faults(cluster(dict.fromkeys(links, SILENT), workers))
    for fault, words in zip(sorted(faults), said, strict=True):
        assert fault.startswith(words) and "in the firewalls between them" in fault
