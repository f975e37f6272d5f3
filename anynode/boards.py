"""Boards, on which torchrun's agents find each other: a shared folder, or the memory of a host.

An `Entry` is what an agent says about itself. A board holds only the latest entry of each agent. Agents post
again and again, so a lost entry is soon replaced. A host answers one request per TCP connection; request and
answer are a line of JSON each. Each wait for a host's answer has a time limit. Nothing received is executed
or unpickled.
"""

import contextlib
import json
import os
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

from anynode.decisions import FINISHED, Entry
from anynode.forms import parse_json, to_form

MAX_LINE_BYTES = 1 << 24  # the entries of 1,000 agents
SERVER_TIMEOUT_S = 5.0

Endpoint = tuple[str, int]  # host, port
Message = dict[str, Any]
Operation = Callable[[Message], Message | str]  # returns the answer to a request; a str is JSON already
FORGET_S = 60.0  # the time after an agent's last post until its entry is removed
FORGET_FINISHED_S = 3600.0  # likewise for FINISHED, which agents that were frozen or cut off must still read
POST_TIMEOUT_S = 1.0
BIND_S = 3.0  # between attempts to listen on a port that is taken


def request(host: str, port: int, message: Message, timeout_s: float) -> Message:
    """Send a message to the Server at (host, port); return the answer.

    `timeout_s` limits each wait, in seconds, except the look-up of the name `host`. Raises OSError if no
    answer comes, or one that cannot be converted to a dict. The answer to a request that the Server refuses
    is {"error": reason}.
    """
    try:
        with socket.create_connection((host, port), timeout_s) as connection:
            connection.sendall(json.dumps(message).encode() + b"\n")
            with connection.makefile("rb") as reader:
                line = reader.readline(MAX_LINE_BYTES)
        return dict(parse_json(line))
    except (ValueError, TypeError, OverflowError) as error:  # no object, or a name that IDNA does not allow
        raise OSError(f"{host}:{port} is not an agent of this kind: {error}") from error


class Server(socketserver.ThreadingTCPServer):
    """A TCP server that answers requests, each in a new thread, with the operation that the request names.

    `operations` is {name: function that takes a request, as a dict, and returns the answer}; the request's
    field `op` is one of the names. Requests are answered while `serve_forever` runs. If the argument `port`
    is 0, the system chooses a free port, and the attribute `port` is its number. Constructing a Server raises
    OSError if it cannot listen at `address` and `port`, for example because the port is taken.
    """

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: str, port: int, operations: Mapping[str, Operation]) -> None:
        class Handler(socketserver.StreamRequestHandler):
            timeout = SERVER_TIMEOUT_S

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # the client is gone, and asks again if it is alive
                    self.wfile.write(answer(operations, self.rfile.readline(MAX_LINE_BYTES)))

        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), Handler)
        self.port: int = self.server_address[1]


def answer(operations: Mapping[str, Operation], line: bytes) -> bytes:
    """Return the answer of an operation to the request `line`, as a line of JSON.

    The request's field `op` is the operation's name. The answer to an invalid request is {"error": reason}.
    """
    try:
        message = parse_json(line)
        result = operations[message["op"]](message)
    except (ValueError, LookupError, TypeError) as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    text = result if isinstance(result, str) else json.dumps(result)
    return text.encode() + b"\n"


class FolderBoard:
    """A shared folder in which the agents of job `rdzv_id` find each other: each posts its entry as a file.

    The files need no locks, so the folder may be on NFS.
    """

    def __init__(self, path: Path, rdzv_id: str) -> None:
        self.name = str(path)
        self._folder = path / quote(rdzv_id, safe="")

    def exchange(self, mine: Entry) -> list[Entry]:
        """Post the entry `mine`, return the valid entries of this job's agents, and remove old entries.

        Entries whose files cannot be opened now are left out. Raises OSError if the folder cannot be used.
        Hangs while the storage hangs.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        own = self._folder / f"{mine.id}.json"
        partial = self._folder / f"{mine.id}.partial"
        partial.write_text(json.dumps(asdict(mine)))
        os.replace(partial, own)
        now = own.stat().st_mtime  # by the storage's clock, as the times of the other files are
        found = []
        for path in filter(Path.is_file, self._folder.glob("*.json")):  # a pipe would hang
            try:
                entries = parse_entries([path.read_bytes()])
                is_finished = [entry.state for entry in entries] == [FINISHED]
                if entries and now - path.stat().st_mtime > (FORGET_FINISHED_S if is_finished else FORGET_S):
                    path.unlink(missing_ok=True)
            except OSError:
                continue  # another agent has just removed the file, or it cannot be read now
            found += entries
        return found


class HostBoard:
    """The memory of the Server at (host, port), in which the agents of job `rdzv_id` find each other."""

    def __init__(self, host: str, port: int, rdzv_id: str) -> None:
        self.name = f"{host}:{port}"
        self._host, self._port, self._rdzv_id = host, port, rdzv_id

    def exchange(self, mine: Entry) -> list[Entry]:
        """Post the entry `mine`; return the valid entries of this job's agents that the host still keeps.

        Raises OSError if that fails, for example if the host does not answer for POST_TIMEOUT_S seconds.
        """
        message = {"op": "post", "rdzv_id": self._rdzv_id, "entry": asdict(mine)}
        entries = request(self._host, self._port, message, POST_TIMEOUT_S).get("entries")
        if not isinstance(entries, list):
            raise OSError(f"{self.name} has no board")
        return parse_entries(entries)


def parse_entries(contents: Iterable[Any]) -> list[Entry]:
    """Return the valid entries among `contents`. A content is JSON as bytes, or JSON already parsed."""
    found = []
    for content in contents:
        try:
            found.append(to_form(Entry, parse_json(content) if isinstance(content, bytes) else content))
        except ValueError:
            continue
    return found


Board = FolderBoard | HostBoard  # the attribute `name` is the board's name in messages


class BoardMemory:
    """The memory behind a HostBoard, in the Server's process: each agent's latest entry, until it expires."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # {(rdzv_id, id of the agent): (its entry as JSON, when it expires by this process's monotonic clock)}
        self._entries: dict[tuple[str, str], tuple[str, float]] = {}

    def post(self, message: Message) -> str:
        """Keep message["entry"]; return {"entries": [kept entries of job message["rdzv_id"]]} as JSON.

        Raises KeyError or TypeError if the job, or the entry's `id` or `state`, is missing.
        """
        now, rdzv_id, entry = time.monotonic(), str(message["rdzv_id"]), message["entry"]
        forget_s = FORGET_FINISHED_S if entry["state"] == FINISHED else FORGET_S
        # Each entry is encoded once: with many agents, encoding is most of the work.
        posted = json.dumps(entry, separators=(",", ":")), now + forget_s
        with self._lock:
            self._entries[rdzv_id, str(entry["id"])] = posted
            self._entries = {key: value for key, value in self._entries.items() if now < value[1]}
            found = [text for (job, _), (text, _) in self._entries.items() if job == rdzv_id]
        return f'{{"entries":[{",".join(found)}]}}'


def serve_once_free(address: str, port: int, operations: dict[str, Operation]) -> None:
    """Answer requests with `operations`, for ever; while `port` is in use, try again every BIND_S seconds."""
    while True:
        try:
            Server(address, port, operations).serve_forever()
        except OSError:
            time.sleep(BIND_S)


def parse_endpoints(text: str) -> list[Endpoint]:
    """Return [(host, port), ...] for a text HOST:PORT[,HOST:PORT...]; [] for any other text."""
    endpoints = []
    name = r"[^/:.\s\[\]]{1,63}(?:\.[^/:.\s\[\]]{1,63})*\.?"  # socket raises UnicodeError for others
    for part in text.split(","):
        match = re.fullmatch(rf"(?:\[([0-9a-fA-F:.]+(?:%[\w.-]+)?)\]|({name})):(\d{{1,5}})", part.strip())
        if not match or not 0 < int(match[3]) < 65536:
            return []
        endpoints.append((match[1] or match[2], int(match[3])))
    return endpoints


def parse_rdzv(text: str) -> Path | list[Endpoint]:
    """Return what `text`, the value of --rdzv, names: [(host, port), ...], or the absolute path of a folder.

    A text HOST:PORT[,HOST:PORT...] names hosts and ports. Any other text with a slash, but without "://", is
    a path. Raises ValueError for all other texts.
    """
    endpoints = parse_endpoints(text)
    if endpoints:
        return endpoints
    if "/" not in text or "://" in text:
        raise ValueError(
            "must be HOST:PORT[,HOST:PORT...] or a folder that all nodes share, written with a slash, such"
            f" as ./rendezvous; got {text!r}"
        )
    return Path(os.path.abspath(text))
