"""Sentences from facts: each names the host, the cause and what to change; a healthy cluster gets none.

Folders that the doctor makes to try them are removed again, whichever rank made which and ends first.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.doctor import CLUSTER, CONFIG, MB

from mingpt.config import Config
from mingpt.tools.doctor.facts import Facts, Folders, find_faults

FIRST, SECOND, THIRD = CLUSTER
SILENT = "no answer within 3 s"


def only_fault(*workers: Facts) -> str:
    (fault,) = find_faults(workers)
    return fault


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"torch": "2.11.0"}, ["node3 has torch 2.11.0 and the others 2.13.0+cpu", "torch==2.13.0)"]),
        ({"threads": 8}, ["node3 computes with 8 CPU threads", "OMP_NUM_THREADS=1"]),
        ({"data": "cd" * 32}, ["data.path play.txt is another text on node3 (sha256 cdcdcdcdcdcd)"]),
        ({"device_type": "cuda"}, ["node3 computes on cuda and the others on cpu"]),
        ({"clock_s": -5.0}, ["the clock of node3 is 5.0 s behind the others'"]),
        ({"config_error": "unknown setting 'a.b'"}, ["node3", "unknown setting 'a.b'"]),
        ({"device_error": "this machine has no GPU"}, ["node3: this machine has no GPU"]),
        ({"address_error": "ib0 names no interface"}, ["node3: ib0", "GLOO_SOCKET_IFNAME"]),
        ({"unfinished": "writing: not done after 20 s"}, ["node3, worker 2: writing: not done"]),
        ({"all_reduce_error": "timed out"}, ["fails on node3 (timed out)", "MTU"]),
        ({"memory_free": 19 * MB}, ["/dev/shm on node3 has 19.0 MB free", "take 20.0 MB"]),
        ({"memory_free": None, "memory_error": "Is absent"}, ["cannot be used on node3 (Is absent)"]),
        (
            {"folders": {"run_dir a": None, "snapshot.path /nfs/a": "Permission denied"}},
            ["snapshot.path /nfs/a cannot", "on node3 (Permission denied)", "another snapshot.path"],
        ),
        (
            {"folders": dict.fromkeys(THIRD["folders"], "Read-only file system")},
            ["run_dir out/a and the snapshot folder", "choose another run_dir"],
        ),
        (
            {"config": CONFIG | {"seed": 2, "optimizer.learning_rate": 0.1}},
            ["node3 is started with optimizer.learning_rate=0.1, seed=2", "learning_rate=0.007, seed=1"],
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
    assert find_faults([FIRST, SECOND, THIRD | {"memory_path": None, "memory_free": None}]) == []


def test_most_workers_decide_and_of_two_equal_halves_that_of_rank_0() -> None:
    assert only_fault(FIRST, SECOND | {"torch": "2.11.0"}).startswith("node2 has torch 2.11.0")
    behind = [FIRST, SECOND | {"clock_s": -5.0}, THIRD | {"clock_s": -5.2}]
    assert "the clock of node1 is 5.0 s ahead of the others'" in only_fault(*behind)


def test_a_node_with_two_workers_is_one_fault() -> None:
    pair = [THIRD | {"rank": rank, "local_rank": rank - 2, "torch": "2.11.0"} for rank in (2, 3)]
    others = [FIRST | {"rank": 4, "local_rank": 1}, SECOND | {"rank": 5, "local_rank": 1}]
    assert only_fault(FIRST, SECOND, *pair, *others).startswith("node3 has torch")


def test_nodes_with_the_same_host_name_are_told_by_their_number() -> None:
    one, other = FIRST | {"host": "vm"}, SECOND | {"host": "vm", "torch": "2.11.0"}
    assert only_fault(one, other).startswith("vm (node 1) has torch 2.11.0")


def test_a_text_is_a_fault_only_if_no_node_can_read_it() -> None:
    error = "data.path play.txt does not exist"
    without = [worker | {"data": None, "data_error": error} for worker in CLUSTER]
    assert find_faults([*without[:2], THIRD]) == []
    second = THIRD | {"rank": 3, "local_rank": 1, "data": None}  # reads nothing itself
    assert only_fault(*without, second) == f"node1 and node2 and node3: {error}"


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
    assert "node3 listens on 10.9.9.1, interface eth1" in fault and "10.0.0.0/24" in fault
    assert "set GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME) to eth0 on node3" in fault
    looped = [FIRST, SECOND | {"address": "127.0.1.1"}]
    fault = only_fault(*cluster({(0, 1): "connection refused"}, looped))
    assert "node2 listens on 127.0.1.1, interface lo" in fault and "to eth0 on node2" in fault


@pytest.mark.parametrize(
    ("links", "said"),
    [
        ([(1, 2)], "node2 cannot connect to node3 on 10.0.0.3 (no answer within 3 s): open TCP ports 32768"),
        ([(1, 2), (2, 1)], "node2 and node3 cannot connect to each other"),
        ([(0, 2), (1, 2)], "no other node can connect to node3 on 10.0.0.3"),
        ([(0, 2), (1, 2), (2, 0), (2, 1)], "no other node can connect to node3"),
        ([(2, 0), (2, 1)], "node3 cannot connect to any other node"),
        ([(1, 2), (1, 3)], "node2 cannot connect to node3"),
    ],
)
def test_links_that_are_blocked_for_one_reason_are_one_fault(links: list[tuple[int, int]], said: str) -> None:
    second = THIRD | {"rank": 3, "local_rank": 1}
    workers = [*CLUSTER, second] if (1, 3) in links else CLUSTER
    fault = only_fault(*cluster(dict.fromkeys(links, SILENT), workers))
    assert fault.startswith(said) and "in the firewalls between them" in fault


def two_ranks(run_dir: Path) -> list[Folders]:
    return [Folders(replace(Config(), run_dir=str(run_dir))) for _ in range(2)]


def try_all(ranks: list[Folders], *order: int) -> None:
    """Each number is a rank, which tries its next folder: the run's, then that of snapshots; all share."""
    left = [list(folders.places.values()) for folders in ranks]
    for rank in order:
        assert ranks[rank].try_one(left[rank].pop(0)) is None
    facts = [{"probe": one.probe, "made": [str(folder) for folder in one.made]} for one in ranks]
    for folders in ranks:
        folders.share(folders.visible(), facts)


@pytest.mark.parametrize("order", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)])
def test_nothing_is_left_in_any_order(order: tuple[int, ...], tmp_path: Path) -> None:
    """In the last order, rank 0 makes `run`, and rank 1 `run/snapshots`."""
    ranks = two_ranks(tmp_path / "new" / "run")
    try_all(ranks, *order)
    ranks[0].clean_up()
    assert len(list(tmp_path.rglob("doctor-*"))) == 2  # those of the other rank
    ranks[1].clean_up()
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_or_is_on_another_disk_remains(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ranks = two_ranks(tmp_path / "run")
    try_all(ranks, 0, 1, 1, 0)
    elsewhere = {"probe": "doctor-elsewhere", "made": [str(tmp_path / "run")]}
    for folders in ranks:
        folders.share(folders.visible(), [elsewhere])
        folders.clean_up()
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]
