"""The addresses of this host, which of them gloo uses, and what happens when one connects to another's.

Knows no process group and no store: what it finds holds for any program on these hosts.
"""

import errno
import ipaddress
import os
import socket
import struct
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CONNECT_S = 3.0
ACCEPT_BACKLOG = 1024
MAX_THREADS = 256
SIOCGIFADDR, SIOCGIFNETMASK = 0x8915, 0x891B
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def networks() -> dict[str, str]:
    """{interface: "10.0.0.2/24"} of those that have an IPv4 address. Empty where the system does not say."""
    try:
        import fcntl
    except ImportError:
        return {}
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                address, mask = (
                    socket.inet_ntoa(fcntl.ioctl(probe.fileno(), which, request)[20:24])
                    for which in (SIOCGIFADDR, SIOCGIFNETMASK)
                )
            except OSError:
                continue  # it has no IPv4 address
            found[name] = ipaddress.ip_interface(f"{address}/{mask}").with_prefixlen
    return found


def gloo_address(interfaces: Mapping[str, str]) -> str:
    """The address on which gloo listens, by its own rule. Raises OSError with a reason in words.

    The first interface of GLOO_SOCKET_IFNAME; without that variable the first address of the host name that
    belongs to this host; else 127.0.0.1 (torch's ProcessGroupGloo, createDefaultDevice).
    """
    name = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0]
    if name in interfaces:
        return interfaces[name].partition("/")[0]
    if name:
        there = ", ".join(f"{one} ({address})" for one, address in interfaces.items())
        raise OSError(
            f"{INTERFACE_VARIABLE}={name} names no interface with an IPv4 address; there are {there}"
        )
    try:
        resolved = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        resolved = []
    for family, kind, protocol, _, address in resolved:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue  # of another host
            return str(address[0])
    return "127.0.0.1"


def ephemeral_ports() -> str:
    """The ports that listen where a program asks for any, "32768-60999"; "" where the system does not say."""
    try:
        return "-".join(PORT_RANGE.read_text().split())
    except OSError:
        return ""


class Listener:
    """Listens at any port of an address, while the process lives; tells a word to all. Raises OSError."""

    def __init__(self, address: str, word: str) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.bind((address, 0))
        self.socket.listen(ACCEPT_BACKLOG)
        self.port, self.word = int(self.socket.getsockname()[1]), word
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
                with connection:
                    connection.sendall(self.word.encode())
            except OSError:
                continue  # whoever connected has gone, and says so itself


def connect(host: str, port: int) -> socket.socket:
    """A connection, for reads of up to CONNECT_S. Raises OSError whose text is the reason in words."""
    try:
        return socket.create_connection((host, port), CONNECT_S)
    except OSError as error:
        raise OSError(why_not(error)) from None


def why_not(error: OSError) -> str:
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return f"no answer within {CONNECT_S:g} s"
    if isinstance(error, socket.gaierror):
        return f"the name does not resolve: {error.strerror}"
    reasons = {
        errno.ECONNREFUSED: "connection refused",
        errno.EHOSTUNREACH: "no route to host",
        errno.ENETUNREACH: "network unreachable",
        errno.EPERM: "forbidden by a firewall on this host",
    }
    return reasons.get(error.errno or 0, error.strerror or str(error))


def find_unreachable(targets: Mapping[int, tuple[str, int, str]]) -> dict[int, str]:
    """Connect to all {rank: (address, port, word)} at once; {rank: reason} of those that do not answer so."""

    def failure(target: tuple[str, int, str]) -> str | None:
        address, port, word = target
        try:
            with connect(address, port) as connection:
                heard = connection.recv(len(word) + 1)
        except OSError as error:
            return str(error) if not isinstance(error, TimeoutError) else why_not(error)
        return None if heard == word.encode() else "another program answers there"

    with ThreadPoolExecutor(min(MAX_THREADS, max(1, len(targets)))) as pool:
        results = dict(zip(targets, pool.map(failure, targets.values()), strict=True))
    return {rank: reason for rank, reason in results.items() if reason is not None}
