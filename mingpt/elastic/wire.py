"""One question, one answer: a line of JSON each way over TCP, every step with a time limit.

Nothing that is received is ever executed or unpickled.
"""

import contextlib
import ipaddress
import json
import socket
import socketserver
from collections.abc import Callable, Mapping
from typing import Any

MAX_LINE_BYTES = 1 << 24  # the entries of 1,000 agents
SERVER_TIMEOUT_S = 5.0

Message = dict[str, Any]
Operation = Callable[[Message], Message | str]  # a string is JSON already


def request(host: str, port: int, message: Message, timeout_s: float) -> Message:
    """The answer of the server at (host, port). Raises OSError: refused, silent, or not one of ours."""
    try:
        made = socket.create_connection((host, port), timeout_s)
    except (ValueError, OverflowError) as error:  # such as a name that IDNA does not allow
        raise OSError(f"{host}:{port} is no address: {error}") from error
    with made as connection:
        connection.sendall(json.dumps(message).encode() + b"\n")
        with connection.makefile("rb") as reader:
            line = reader.readline(MAX_LINE_BYTES)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise OSError(f"{host}:{port} is not an agent of this kind") from error
    if not isinstance(answer, dict):
        raise OSError(f"{host}:{port} is not an agent of this kind")
    return answer


class Server:
    """Answers requests on (address, port) in threads of its own, by the operation that each names in `op`.

    Raises OSError if the port is taken.
    """

    def __init__(self, address: str, port: int, operations: Mapping[str, Operation]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = SERVER_TIMEOUT_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # whoever asked is gone, and asks again if it lives
                    self.wfile.write(answer(operations, self.rfile.readline(MAX_LINE_BYTES)))

        class Threads(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True
            request_queue_size = 128
            address_family = socket.AF_INET6 if is_ipv6(address) else socket.AF_INET

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # a connection that was cut: no traceback in the log of the job

        self._server = Threads((address, port), Handler)
        self.port: int = self._server.server_address[1]

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.5)


def answer(operations: Mapping[str, Operation], line: bytes) -> bytes:
    """The line that answers a line; {"error": ...} if it is no request."""
    try:
        message = json.loads(line)
        result = operations[message["op"]](message)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    text = result if isinstance(result, str) else json.dumps(result)
    return text.encode() + b"\n"


def is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False
