"""Who cannot connect to whom, in sentences: a wrong interface is told from a blocked port."""

from collections.abc import Mapping
from dataclasses import replace

from support.doctor import CLUSTER

from mingpt.tools.doctor import Facts, find_faults

SILENT = "no answer within 3 s"


def cluster(failed: Mapping[tuple[int, int], str], workers: list[Facts] = CLUSTER) -> list[Facts]:
    """The three nodes, on which connections from a rank to a rank failed."""
    return [
        replace(
            worker, unreachable={to: why for (source, to), why in failed.items() if source == worker.rank}
        )
        for worker in workers
    ]


def moved(address: str, **networks: str) -> list[Facts]:
    """Node 3 listens on another address."""
    own = CLUSTER[2].networks | networks
    return [*CLUSTER[:2], replace(CLUSTER[2], address=address, networks=own)]


def test_an_address_of_another_network_that_nobody_reaches_is_a_wrong_interface() -> None:
    workers = cluster({(0, 2): SILENT, (1, 2): "no route to host"}, moved("10.9.9.1", eth1="10.9.9.1/24"))
    (fault,) = find_faults(workers)
    assert "node3 listens on 10.9.9.1, interface eth1" in fault and "10.0.0.0/24" in fault
    assert "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to eth0 on node3" in fault


def test_loopback_is_a_wrong_interface_with_two_nodes_too() -> None:
    (fault,) = find_faults(cluster({(0, 1): "connection refused"}, [
        CLUSTER[0], replace(CLUSTER[1], address="127.0.1.1")]))  # fmt: skip
    assert "node2 listens on 127.0.1.1, interface lo" in fault and "to eth0 on node2" in fault


def test_another_network_that_is_routed_is_no_fault() -> None:
    assert find_faults(cluster({}, moved("10.9.9.1", eth1="10.9.9.1/24"))) == []


def test_one_direction_of_one_link_is_a_blocked_port() -> None:
    (fault,) = find_faults(cluster({(1, 2): SILENT}))
    assert fault.startswith("node2 cannot connect to node3 on 10.0.0.3 (no answer within 3 s)")
    assert (
        "node3 can connect to node2" in fault
        and "ports 32768-60999" in fault
        and "of node3 to node2" in fault
    )


def test_both_directions_of_a_link_are_one_fault() -> None:
    (fault,) = find_faults(cluster({(1, 2): SILENT, (2, 1): SILENT}))
    assert fault.startswith("node2 and node3 cannot connect to each other")


def test_a_node_in_the_right_network_that_nobody_reaches_has_a_firewall() -> None:
    (fault,) = find_faults(cluster({(0, 2): SILENT, (1, 2): SILENT}))
    assert fault.startswith("no other node can connect to node3 on 10.0.0.3") and "GLOO" not in fault
    both = {(0, 2): SILENT, (1, 2): SILENT, (2, 0): SILENT, (2, 1): SILENT}
    (fault,) = find_faults(cluster(both))
    assert "nor the other way round" in fault


def test_a_node_that_reaches_nobody_is_one_fault() -> None:
    (fault,) = find_faults(cluster({(2, 0): SILENT, (2, 1): SILENT}))
    assert fault.startswith("node3 cannot connect to any other node")


def test_several_workers_of_a_node_are_one_link() -> None:
    second = replace(CLUSTER[2], rank=3, local_rank=1)
    (fault,) = find_faults(cluster({(1, 2): SILENT, (1, 3): SILENT}, [*CLUSTER, second]))
    assert fault.startswith("node2 cannot connect to node3")
