"""Sentences from facts: each names the host, the cause and what to change; a healthy cluster gets none.

What the doctor writes to try a folder is removed again.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mingpt.config import Config, TrainerConfig
from mingpt.distributed import Launch
from mingpt.tools.doctor.facts import Facts, Findings, find_faults, find_memory, try_folder

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
        "data_path": "play.txt",
        "data": "ab" * 32,
        "folders": "written, read",
        "memory": "500.0 MB free, 20.0 MB needed",
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
        ({"data": "cd" * 32}, ["data.path play.txt is another text on node3 (sha256 cdcdcdcdcdcd)"]),
        ({"device_type": "cuda"}, ["node3 computes on cuda and the others on cpu"]),
        ({"clock_s": -5.0}, ["the clock of node3 differs from the others' by -5.0 s"]),
        ({"device_error": "this machine has no GPU"}, ["node3: this machine has no GPU"]),
        ({"address_error": "ib0 names no interface"}, ["node3: ib0", "GLOO_SOCKET_IFNAME"]),
        ({"unfinished": "writing: not done after 20 s"}, ["node3, worker 2: writing: not done"]),
        ({"all_reduce_error": "timed out"}, ["fails on node3 (timed out)", "MTU"]),
        (
            {"memory_error": ["/dev/shm", "has 19.0 MB free"]},
            ["snapshot.memory_path /dev/shm on node3 has 19.0 MB free: enlarge it"],
        ),
        (
            {"folder_error": ["run_dir", "out/a", "Read-only file system"]},
            ["run_dir out/a cannot be written and read on node3 (Read-only", "another run_dir"],
        ),
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


def test_a_folder_or_the_one_in_which_it_will_be_made_is_tried_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[Path] = []
    rename = os.replace

    def note(source: str, target: str) -> None:
        rename(source, target)
        if Path(target).is_relative_to(tmp_path):  # threads of other tests may rename files, too
            tried.append(Path(target).parent)

    monkeypatch.setattr("os.replace", note)
    (tmp_path / "there").mkdir()
    for place in ("there", "there/run/snapshots"):
        assert try_folder(str(tmp_path / place)) is None
    assert tried == [tmp_path / "there"] * 2 and list(tmp_path.rglob("*")) == [tmp_path / "there"]
    assert try_folder("memory://doctor/run") is None


def test_a_worker_finds_what_its_node_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    config = replace(Config(), run_dir=str(tmp_path / "file" / "run"))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1_500_000))
    found = Findings(Launch(), config).take()
    assert found["folder_error"] == ["run_dir", config.run_dir, "Not a directory"]
    path, lack = found["memory_error"]
    assert path == "/dev/shm" and lack.startswith("has 1.5 MB free and two states of this model take ")
    assert found["memory"].startswith("1.5 MB free, ") and len(found["data"]) == 64
    assert find_memory(config, 750_000) == {"memory": "1.5 MB free, 1.5 MB needed"}


def test_a_node_of_a_sharded_job_needs_room_for_its_own_part_and_a_copy(tmp_path: Path) -> None:
    config = replace(Config(), run_dir=str(tmp_path), trainer=TrainerConfig(parallel="fsdp"))
    whole, of_two, of_eight = (
        Findings(Launch(world_size=workers), config).take()["memory"].split(", ")[1] for workers in (1, 2, 8)
    )
    assert whole == of_two == "11.0 MB needed" and of_eight == "2.8 MB needed"


def test_one_that_does_not_end_in_time_says_what_it_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.tools.doctor.facts.FINDINGS_S", 0.1)
    monkeypatch.setattr("mingpt.tools.doctor.facts.try_folder", lambda place: threading.Event().wait())
    config = replace(Config(), run_dir=str(tmp_path / "run"))
    found = Findings(Launch(), config).take()
    doing, _, reason = found["unfinished"].rpartition(": ")
    assert doing in (f"writing to run_dir {config.run_dir}", "looking at its device")
    assert reason == "not done after 0.1 s"
