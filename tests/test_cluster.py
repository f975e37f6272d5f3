"""The test bed: nodes on one machine that see, lose and find each other as machines do."""

import signal
import sys
import time
from collections.abc import Callable

from conftest import all_gone, wait_until
from support.nodes import Cluster, Node
from support.nodes_job import listens

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
    assert listens(first, 5000) and not listens(first, 5001)
    first.heal()
    assert connect(first, second) == connect(second, first) == "connected"


def test_storage_that_is_cut_hangs_and_heals(cluster: MakeCluster) -> None:
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
