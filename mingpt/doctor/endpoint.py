"""The meeting point of a cluster, looked at from one host alone, for when no worker ever starts."""

import json
import socket
import struct

from mingpt.doctor.network import connect
from mingpt.errors import UserError

ANSWER_S = 2.0
# torch's TCPStoreBackend.hpp: VALIDATE with its magic number, then PING with a number that is sent back.
STORE_PING = struct.pack("<BIBI", 0, 0x3C85F7CE, 13, 0x6D696E67)
STORE_PONG = struct.pack("<I", 0x6D696E67)
AGENT_PING = b'{"op": "ping"}\n'


def check_endpoint(where: str) -> tuple[bool, list[str]]:
    """Whether agents can meet at one of HOST:PORT[,HOST:PORT...], and a line on each. Raises UserError."""
    is_good, lines = False, []
    for one in where.split(","):
        host, port = parse_endpoint(one)
        works, line = describe_endpoint(host, port)
        is_good = is_good or works
        lines.append(f"{one}: {line}")
    return is_good, lines


def parse_endpoint(where: str) -> tuple[str, int]:
    host, _, port = where.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(f"--endpoint must be HOST:PORT, such as node1:29400, not {where!r}")
    return host, int(port)


def describe_endpoint(host: str, port: int) -> tuple[bool, str]:
    """Whether agents or workers can meet there, and what this host sees of it."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        reason = error.strerror or error
        return False, f"the name does not resolve on {socket.gethostname()} ({reason}): give an address"
    addresses = ", ".join(dict.fromkeys(str(entry[4][0]) for entry in found))
    target = host if addresses == host else f"{host} is {addresses};"
    try:
        with connect(host, port) as connection:
            own = connection.getsockname()[0]
            heard = ask(connection, STORE_PING)
    except OSError as error:
        return False, f"{target} {error}: {advice(str(error), port)}{loopback_remark(addresses, host)}"
    seen = f"{target} reached from {own}; "
    if heard == STORE_PONG:
        return True, f"{seen}a store of torch answers"
    try:
        with connect(host, port) as connection:
            heard = ask(connection, AGENT_PING) or heard
    except OSError as error:
        return False, f"{seen}then {error}"
    if is_agent(heard):
        return True, f"{seen}an agent of mingpt.elastic answers"
    if not heard:
        return False, f"{seen}it says nothing within {ANSWER_S:g} s: a frozen agent, or another program"
    return False, f"{seen}another program has port {port}: it says {heard[:40]!r}"


def ask(connection: socket.socket, question: bytes) -> bytes:
    """The first bytes of the answer; none if there is none, or the other side hangs up."""
    connection.settimeout(ANSWER_S)
    try:
        connection.sendall(question)
        return connection.recv(4096)
    except OSError:
        return b""


def is_agent(answer: bytes) -> bool:
    """Whether a ping was answered, by an agent's name, and not refused, as by {"error": ...}."""
    try:
        content = json.loads(answer)
    except ValueError:
        return False
    return isinstance(content, dict) and "id" in content


def advice(reason: str, port: int) -> str:
    """What to do about a connection that fails."""
    if "refused" in reason:
        return (
            f"the host is up and nothing listens on port {port}: start the agent there first, look at its "
            "port, and at the address that it listens on"
        )
    if "no answer" in reason:
        return f"the host is down, or a firewall drops what is sent to TCP port {port}: open it from here"
    return "look at the address and at the routes of this host"


def loopback_remark(addresses: str, host: str) -> str:
    if host in ("localhost", addresses) or not addresses.startswith(("127.", "::1")):
        return ""
    return f"; {host} resolves to {addresses} here, which is this host itself: correct /etc/hosts"
