"""Where agents see each other: a folder that all share, or the memory of hosts that they reach.

A board holds each agent's latest entry and nothing else. It is soft state: what is lost is posted again. To a
host there is one question and one answer, a line of JSON each way over TCP, every step with a time limit;
nothing that is received is ever executed or unpickled.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mingpt.base.errors import UserError
from mingpt.base.files import BadJson, check_json, parse_json, write_atomic
from mingpt.launch.elastic.decisions import FINISHED, Entry

MAX_LINE_BYTES = 1 << 24  # the entries of 1,000 agents
SERVER_TIMEOUT_S = 5.0

Message = dict[str, Any]
Operation = Callable[[Message], Message | str]  # a string is JSON already
FORGET_S = 60.0  # for an agent that was killed
FORGET_FINISHED_S = 3600.0  # for an agent that is frozen or cut off while the others finish
POST_TIMEOUT_S = 1.0
BIND_S = 3.0  # between attempts to listen on a port that is taken


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
        return check_json(parse_json(line), Message)
    except BadJson as error:
        raise OSError(f"{host}:{port} is not an agent of this kind") from error


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

        self._server = Threads((address, port), Handler)
        self.port: int = self._server.server_address[1]

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.5)


def answer(operations: Mapping[str, Operation], line: bytes) -> bytes:
    """The line that answers a line; {"error": ...} if it is no request."""
    try:
        message = parse_json(line)
        result = operations[message["op"]](message)
    except (ValueError, KeyError, TypeError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    text = result if isinstance(result, str) else json.dumps(result)
    return text.encode() + b"\n"


def is_ipv6(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 6
    except ValueError:
        return False


class FolderBoard:
    """A file for each agent, replaced by rename: needs no locks, does not grow, and works on NFS."""

    def __init__(self, path: Path, rdzv_id: str) -> None:
        self.name = str(path)
        self._folder = path / quote(rdzv_id, safe="")

    def exchange(self, mine: Entry) -> list[Entry]:
        """Post `mine` and return all entries. Raises OSError; may hang where storage does."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own, partial = self._folder / f"{mine.id}.json", self._folder / f"{mine.id}.partial"
        write_atomic(own, json.dumps(asdict(mine)), partial, sync="nothing")
        now = own.stat().st_mtime  # by the clock of the storage, which the other files have, too
        found = []
        for path in self._folder.glob("*.json"):
            try:
                entries = parse_entries([path.read_bytes()])
                is_finished = [entry.state for entry in entries] == [FINISHED]
                if now - path.stat().st_mtime > (FORGET_FINISHED_S if is_finished else FORGET_S):
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # another agent has just removed it, or this one file cannot be read now
            found += entries
        return found


class HostBoard:
    """The memory of a host's server, be it an agent's or `python -m mingpt.launch.elastic --serve`."""

    def __init__(self, host: str, port: int, rdzv_id: str) -> None:
        self.name = f"{host}:{port}"
        self._host, self._port, self._rdzv_id = host, port, rdzv_id

    def exchange(self, mine: Entry) -> list[Entry]:
        """Post `mine` and return all entries. Raises OSError."""
        message = {"op": "post", "rdzv_id": self._rdzv_id, "entry": asdict(mine)}
        entries = request(self._host, self._port, message, POST_TIMEOUT_S).get("entries")
        if not isinstance(entries, list):
            raise OSError(f"{self.name} has no board")
        return parse_entries(entries)


def parse_entries(contents: Iterable[Any]) -> list[Entry]:
    """What is not an entry, of a later version of this program say, is left out. Bytes are JSON."""
    found = []
    for content in contents:
        try:
            found.append(check_json(parse_json(content) if isinstance(content, bytes) else content, Entry))
        except BadJson:
            continue
    return found


Board = FolderBoard | HostBoard  # `name` is what messages call it


@dataclass(frozen=True)
class Posted:
    rdzv_id: str
    text: str  # the entry as JSON
    until: float  # by this process's monotonic clock


class BoardMemory:
    """What a host board's server remembers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Posted] = {}

    def post(self, message: Message) -> str:
        """The answer as JSON: for many agents, encoding each entry each time would be most of the work."""
        now, rdzv_id, entry = time.monotonic(), str(message["rdzv_id"]), message["entry"]
        forget_s = FORGET_FINISHED_S if entry["state"] == FINISHED else FORGET_S
        posted = Posted(rdzv_id, json.dumps(entry, separators=(",", ":")), now + forget_s)
        with self._lock:
            self._entries[rdzv_id, str(entry["id"])] = posted
            self._entries = {key: value for key, value in self._entries.items() if now < value.until}
            found = [value.text for value in self._entries.values() if value.rdzv_id == rdzv_id]
        return f'{{"entries":[{",".join(found)}]}}'


def serve(address: str, port: int) -> None:
    """Hold a board for agents elsewhere, until this process is ended. Raises OSError if the port is taken."""
    Server(address, port, {"post": BoardMemory().post}).serve_forever()


def serve_once_free(address: str, port: int, operations: dict[str, Operation]) -> None:
    """Answer on a port that is taken, by an agent of before say, as soon as it is free."""
    while True:
        try:
            server = Server(address, port, operations)
        except OSError:
            time.sleep(BIND_S)
        else:
            server.serve_forever()


@dataclass(frozen=True)
class Endpoint:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


def parse_endpoints(text: str) -> list[Endpoint]:
    """HOST:PORT[,HOST:PORT...]; empty if the text is anything else."""
    endpoints = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^/:\s\[\]]+)):(\d{1,5})", part.strip())
        if not match or not 0 < int(match[3]) < 65536:
            return []
        endpoints.append(Endpoint(match[1] or match[2], int(match[3])))
    return endpoints


def parse_rdzv(text: str) -> Path | list[Endpoint]:
    """A folder, or HOST:PORT[,HOST:PORT...]. Raises UserError."""
    endpoints = parse_endpoints(text)
    if endpoints:
        return endpoints
    if "/" not in text or "\n" in text:
        raise UserError(
            "--rdzv is HOST:PORT[,HOST:PORT...] or a folder that all nodes share, written with a slash, such"
            f" as ./rendezvous; got {text!r}"
        )
    return Path(os.path.abspath(text))
