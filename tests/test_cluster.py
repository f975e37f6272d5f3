"""The test bed: nodes on one machine that see, lose and find each other as machines do."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT, all_gone, wait_until
from support.nodes import Cluster, Node, why_no_cluster
from support.nodes_job import listens

from mingpt.tools.jobs import clean_environment

MakeCluster = Callable[..., Cluster]
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=1.5).close()
    print("connected")
except OSError as error:
    print(type(error).__name__)
"""
LISTEN = """
import socket, sys
servers = [socket.create_server(("", int(port))) for port in sys.argv[1:]]
print("listens", flush=True)
while True:
    for server in servers:
        server.settimeout(0.05)
        try:
            server.accept()[0].close()
        except TimeoutError:
            pass
"""


def listen(node: Node, *ports: int) -> None:
    job = node.start([sys.executable, "-c", LISTEN, *map(str, ports)])
    job.wait_until(lambda: "listens" in job.out())


def connect(node: Node, to: Node, port: int = 5000) -> str:
    """What becomes of a connection: "connected", or the error's name."""
    return node.run(sys.executable, "-c", CONNECT, to.address, str(port))


def test_nodes_have_addresses_names_and_processes_of_their_own(cluster: MakeCluster) -> None:
    first, second = cluster(2, shared=False).nodes
    assert first.run("hostname") == "node1" and second.run("hostname") == "node2"
    assert first.run("getent", "hosts", "node2").split() == [second.address, "node2"]
    listen(first, 5000)
    assert connect(second, first) == "connected"
    assert connect(second, first, 5001) == "ConnectionRefusedError"
    assert listens(first, 5000) and not listens(first, 5001) and not listens(second, 5000)
    assert first.run("readlink", "/proc/self/ns/pid") != second.run("readlink", "/proc/self/ns/pid")
    job = second.start(["sleep", "60"])
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait(5) == -signal.SIGTERM


def test_a_killed_node_returns_with_its_disk_or_an_empty_one_and_with_empty_memory(
    cluster: MakeCluster,
) -> None:
    made = cluster(2, shared=False)
    first, second = made.nodes
    listen(first, 5000)
    job = first.start(["sh", "-c", "sleep 60 & sleep 60"])
    first.run("touch", "/dev/shm/mine", str(made.disk / "mine"))
    wait_until(lambda: len(first.pids()) >= 4, 5)  # the shell has started both
    pids = first.pids()
    assert job.pid in pids
    first.kill()
    assert all_gone(pids) and not first.is_up() and job.wait(1) == -signal.SIGKILL
    assert connect(second, first) == "TimeoutError"
    first.boot()
    assert connect(second, first) == "ConnectionRefusedError"
    assert "mine" not in first.run("ls", "/dev/shm") and "mine" in first.run("ls", str(made.disk))
    first.kill()
    first.boot(wipe=True)
    assert "mine" not in first.run("ls", str(made.disk))


def test_a_node_cut_off_from_the_network_times_out_until_it_is_healed(cluster: MakeCluster) -> None:
    first, second, third = cluster(3, shared=False).nodes
    for node in (first, second, third):
        listen(node, 5000)
    first.cut_network()
    for one, other in ((first, second), (second, first), (third, first)):
        assert connect(one, other) == "TimeoutError"
    assert connect(second, third) == connect(first, first) == "connected"
    first.heal()
    assert connect(first, second) == connect(second, first) == "connected"


def test_a_port_is_blocked_in_one_direction_from_one_node(cluster: MakeCluster) -> None:
    first, second, third = cluster(3, shared=False).nodes
    listen(first, 5000, 5001, 5010)
    listen(second, 5000)
    first.block("5000-5009", from_node=second)
    assert connect(second, first) == connect(second, first, 5001) == "TimeoutError"
    assert connect(second, first, 5010) == "connected"
    assert connect(first, second) == connect(third, first) == "connected"
    first.heal()
    assert connect(second, first) == "connected"


def test_all_nodes_see_the_shared_folder_and_its_locks(cluster: MakeCluster) -> None:
    made = cluster(2)
    first, second = made.nodes
    path = made.shared / "file"
    first.run("sh", "-c", f"echo one > {path}")
    assert path.read_text() == second.run("cat", str(path)) + "\n" == "one\n"
    path.write_text("two\n")
    assert first.run("cat", str(path)) == "two"
    holder = first.start(["flock", str(path), "sleep", "60"])
    wait_until(lambda: "locked" in second.run("sh", "-c", f"flock -n {path} echo free || echo locked"))
    holder.kill()
    wait_until(lambda: "free" in second.run("sh", "-c", f"flock -n {path} echo free || echo locked"))


def test_storage_that_is_cut_hangs_or_fails_and_heals(cluster: MakeCluster) -> None:
    made = cluster(2)
    first, second = made.nodes
    path = made.shared / "file"
    path.write_text("here\n")
    first.cut_storage()
    reader = first.start(["cat", str(path)])
    time.sleep(1)
    assert reader.is_running() and second.run("cat", str(path)) == "here"
    first.heal()
    assert reader.wait(5) == 0 and reader.out() == "here\n"
    first.cut_storage(abort=True)
    failing = first.start(["cat", str(path)])
    assert failing.wait(5) == 1 and "Transport endpoint is not connected" in failing.err()
    first.heal()
    assert first.run("cat", str(path)) == "here"
    first.cut_storage()
    reader = first.start(["cat", str(path)])
    first.kill()  # processes that wait for storage do not keep a node from dying
    assert reader.wait(5) == -signal.SIGKILL
    first.boot()
    assert first.run("cat", str(path)) == "here"


def test_a_frozen_node_does_nothing_until_it_is_thawed(cluster: MakeCluster) -> None:
    (node,) = cluster(1, shared=False).nodes
    job = node.start(["sh", "-c", "while true; do echo again; sleep 0.02; done"])
    job.wait_until(job.out)
    node.freeze()
    before = job.out()
    time.sleep(0.5)
    assert job.out() == before
    node.thaw()
    job.wait_until(lambda: len(job.out()) > len(before))
    node.freeze()
    node.kill()
    assert job.wait(5) == -signal.SIGKILL


@pytest.mark.skipif(why_no_cluster() is not None, reason=why_no_cluster() or "")
def test_nothing_is_left_of_a_cluster_whose_program_is_killed(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from support.nodes import Cluster
cluster = Cluster(1, Path(sys.argv[1]))
cluster.nodes[0].start(["sleep", "1000"])
print(*cluster.nodes[0].pids(), flush=True)
time.sleep(1000)
"""
    environment = clean_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    program = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert program.stdout
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) >= 2 and not all_gone(pids)
    program.kill()
    program.wait()
    program.stdout.close()
    wait_until(lambda: all_gone(pids), 5)
