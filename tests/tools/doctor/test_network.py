"""Which address gloo listens on, and what connecting to one tells."""

import socket
import subprocess
import sys

import pytest
from conftest import ROOT
from support.jobs import free_port
from support.needs import need_proc

from mingpt.tools.doctor.network import find_unreachable, gloo_address, listen, named_address, networks
from mingpt.tools.jobs import clean_environment

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


@pytest.mark.parametrize("interface", [None, "lo"])
def test_gloo_listens_where_it_is_expected_to(interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own socket, as the system lists it."""
    need_proc()
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    expected = gloo_address(networks())
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=clean_environment(), capture_output=True, text=True
    )
    assert done.stdout.splitlines() == [expected], done.stderr[-2000:]


@pytest.mark.skipif(sys.platform != "linux", reason="asks by Linux's ioctl")
def test_an_interface_that_is_not_there_is_named_with_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib9")
    with pytest.raises(OSError, match=r"ib9 names no interface.*lo \(127\.0\.0\.1/8\)"):
        gloo_address(networks())


@pytest.mark.parametrize("name", ["nowhere.invalid", "192.0.2.1"])
def test_a_host_name_that_is_nobodys_or_another_hosts_gives_no_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    assert named_address() is None and gloo_address(networks()) == "127.0.0.1"


def test_connections_that_fail_are_told_by_their_reason() -> None:
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = [socket.socket() for _ in range(4)]
    for connection in waiting:  # its queue is full from here on, and the kernel drops what comes
        connection.setblocking(False)
        connection.connect_ex(full.getsockname())
    targets = {
        0: ("127.0.0.1", listen("127.0.0.1")),
        1: ("127.0.0.1", free_port()),
        2: ("127.0.0.1", full.getsockname()[1]),
    }
    assert find_unreachable(targets) == {1: "connection refused", 2: "no answer within 3 s"}
    for one in (*waiting, full):
        one.close()
