"""Sentences from facts: each names the node, the cause and what to do; a healthy cluster gets none."""

import socketserver
import subprocess
import sys
from typing import Any

import pytest
from conftest import ROOT
from support.jobs import free_port
from support.needs import need_proc

from mingpt.base.system import start
from mingpt.tools.doctor import Facts, ZeroServer, find_addresses, find_faults, receive_from
from mingpt.tools.jobs import clean_environment


def cluster(*changes: dict[str, Any]) -> list[Facts]:
    """The facts of a worker on each of three nodes, the last ones changed."""
    plain: dict[str, Any] = {
        "host": "eth0",
        "device": "cpu AVX512",
        "program": "torch 2.13",
        "threads": 1,
        "Python": "3.12",
    }
    plain |= {"clock": 0.0, "problem": "", "links": [], "port": 1}
    facts = [plain | {"name": f"node{n}"} for n in (1, 2, 3)]
    for there, change in zip(reversed(facts), reversed(changes), strict=False):
        there.update(change)
    return facts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([{"program": "torch 2.11"}], "node3: program is torch 2.11, on the others torch 2.13: install"),
        ([{"threads": 8}, {}], "node2: threads is 8, on the others 1: set OMP_NUM_THREADS"),
        ([{"threads": 8}, {"threads": 8}, {}], "node3: threads is 1, on the others 8"),
        ([{"threads": 4}, {"threads": 2}, {"threads": 2}], "node1: threads is 4"),
        ([{"device": "", "problem": "GPUs for 1 of 2 workers"}], "node3: GPUs for 1 of 2 workers"),
        ([{"clock": -5.0}, {"clock": -5.0}], "node2 and node3: the clock is -5.0 s off node1's"),
        ([{"links": [[2, "10.9.9.1: no answer", 0.0]]}, {}], "node2 cannot connect to node3 at 10.9.9.1: no"),
        (
            [{"links": [[1, "", 90.0], [2, "", 90.0]]}, {"links": [[2, "", 9.0], [0, "", 80.0]]}, {}],
            "node2 receives 9.0 MB/s from node3, and 90.0 are usual",
        ),
        ([{"links": [[2, "", 90.0]]}, {}, {"links": [[0, "", 0.0]]}], "node3 receives 0.0 MB/s from node1"),
    ],
)
def test_a_fault_is_one_sentence_that_names_the_node(changes: list[dict[str, Any]], said: str) -> None:
    (fault,) = find_faults(cluster(*changes))[1]
    assert f" {said}" in fault


def test_a_worker_that_is_silent_is_a_fault_among_others() -> None:
    rows, faults = find_faults([*cluster({"threads": 8}), None])
    assert len(rows) == 6 and len(faults) == 2
    assert faults[0].startswith("fault:   worker 3 did not answer within 60 s")


def test_nodes_whose_first_workers_are_all_silent_are_faults() -> None:
    """Only a node's first worker has a port, and with it a fact `host`."""
    _, faults = find_faults([None, *cluster({"port": 0}, {"port": 0}, {"port": 0})])
    assert faults == ["fault:   worker 0 did not answer within 60 s: look at its own output"]


def test_a_healthy_cluster_has_no_fault_and_a_line_per_fact() -> None:
    links = {"links": [[0, "", 90.0], [1, "", 30.0]]}
    rows, faults = find_faults(cluster({"Python": "3.13", "clock": 0.9, "host": "eth1"} | links))
    assert faults == []
    assert rows[:3] == [
        "host     node1, node2: eth0",
        "host     node3: eth1",
        "device   node1, node2, node3: cpu AVX512",
    ]
    assert rows[-1] == "MB/s     node3 receives 30.0 from node2"


def test_an_address_that_nobody_reaches_is_told_with_the_one_that_can_be_reached() -> None:
    server = ZeroServer(("", 0), socketserver.BaseRequestHandler)
    start(server.serve_forever)
    there = {"addresses": {"eth1": "nowhere.invalid", "eth0": "127.0.0.1"}, "port": server.server_address[1]}
    problem, mb_s = receive_from(there)
    assert problem.startswith("nowhere.invalid (eth1): ") and mb_s > 0
    assert problem.endswith(
        "; 127.0.0.1 can be reached: set GLOO_SOCKET_IFNAME=eth0 (and NCCL_SOCKET_IFNAME) there"
    )
    problem, _ = receive_from({"addresses": {"lo": "127.0.0.1"}, "port": free_port()})
    assert problem.startswith("127.0.0.1 (lo): Connection refused; let TCP ports")


PROGRAM = """
import ipaddress, os, torch.distributed as distributed
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(name) for name in names if os.path.islink(name)}
tables = [name for name in ("/proc/net/tcp", "/proc/net/tcp6") if os.path.exists(name)]
for line in [line for name in tables for line in open(name).read().splitlines()[1:]]:
    fields = line.split()
    host, port = fields[1].split(":")
    if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes and int(port, 16) != store.port:
        words = [bytes.fromhex(host[start:start + 8])[::-1] for start in range(0, len(host), 8)]
        print(ipaddress.ip_address(b"".join(words)))
"""


@pytest.mark.parametrize("interface", ["", "lo"])
def test_gloo_listens_at_the_first_address(interface: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own socket, as the system lists it."""
    need_proc()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    expected = next(iter(find_addresses().values()))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=clean_environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [expected], done.stderr[-2000:]


def test_a_host_name_that_does_not_resolve_gives_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr("platform.node", lambda: "nowhere.invalid")
    assert next(iter(find_addresses().items())) == ("host name", "127.0.0.1")
