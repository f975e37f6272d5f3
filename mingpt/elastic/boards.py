"""Where agents see each other: a folder that all share, or the memory of hosts that they reach.

A board holds each agent's latest entry and nothing else. It is soft state: what is lost is posted again.
"""

import json
import os
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from mingpt.elastic.decisions import FINISHED, Entry
from mingpt.elastic.wire import Message, Operation, Server, request

FORGET_S = 60.0  # for an agent that was killed
FORGET_FINISHED_S = 3600.0  # for an agent that is frozen or cut off while the others finish
POST_TIMEOUT_S = 1.0
BIND_S = 3.0  # between attempts to listen on a port that is taken


class Board(Protocol):
    name: str  # as it is called in messages

    def exchange(self, mine: Entry) -> list[Entry]:
        """Post `mine` and return all entries. Raises OSError; may hang where storage does."""

    def remove(self, mine: Entry) -> None:
        """Raises OSError."""


class FolderBoard:
    """A file for each agent, replaced by rename: needs no locks, does not grow, and works on NFS."""

    def __init__(self, path: Path, rdzv_id: str) -> None:
        self.name = str(path)
        self._folder = path / quote(rdzv_id, safe="")
        self._unchanged: dict[str, tuple[bytes, float]] = {}

    def exchange(self, mine: Entry) -> list[Entry]:
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        partial = self._folder / f"{mine.id}.partial"
        partial.write_text(json.dumps(mine.to_json()))
        partial.replace(self._folder / f"{mine.id}.json")
        found, paths = [], list(self._folder.glob("*.json"))
        for path in paths:
            try:
                content = path.read_bytes()
                self._clean(path, content)
            except OSError:
                continue  # its agent has just ended, or this one file cannot be read now
            found += parse_entries([content])
        listed = {path.name for path in paths}
        self._unchanged = {name: value for name, value in self._unchanged.items() if name in listed}
        return found

    def _clean(self, path: Path, content: bytes) -> None:
        """Remove what an agent left that was killed, and, after a longer time, that a job is finished."""
        before, since = self._unchanged.get(path.name, (b"", 0.0))
        if before != content:
            self._unchanged[path.name] = (content, time.monotonic())
            return
        is_finished = [entry.state for entry in parse_entries([content])] == [FINISHED]
        if time.monotonic() - since > (FORGET_FINISHED_S if is_finished else FORGET_S):
            path.unlink(missing_ok=True)

    def remove(self, mine: Entry) -> None:
        (self._folder / f"{mine.id}.json").unlink(missing_ok=True)


class HostBoard:
    """The memory of a host's server, be it an agent's or `python -m mingpt.elastic --serve`."""

    def __init__(self, host: str, port: int, rdzv_id: str) -> None:
        self.name = f"{host}:{port}"
        self._host, self._port, self._rdzv_id = host, port, rdzv_id

    def exchange(self, mine: Entry) -> list[Entry]:
        message = {"op": "post", "rdzv_id": self._rdzv_id, "entry": mine.to_json()}
        answer = request(self._host, self._port, message, POST_TIMEOUT_S)
        entries = answer.get("entries")
        if not isinstance(entries, list):
            raise OSError(f"{self.name} has no board")
        return parse_entries(entries)

    def remove(self, mine: Entry) -> None:
        message = {"op": "remove", "rdzv_id": self._rdzv_id, "id": mine.id}
        request(self._host, self._port, message, POST_TIMEOUT_S)


def parse_entries(contents: Iterable[Any]) -> list[Entry]:
    """What is not an entry, of a later version of this program say, is left out. Bytes are JSON."""
    found = []
    for content in contents:
        try:
            found.append(Entry.from_json(json.loads(content) if isinstance(content, bytes) else content))
        except (ValueError, RecursionError):
            continue
    return found


@dataclass(frozen=True)
class Posted:
    rdzv_id: str
    text: str  # the entry as JSON
    until: float  # by this process's monotonic clock


class BoardMemory:
    """What a host board's server remembers: the operations `post` and `remove`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[tuple[str, str], Posted] = {}

    def operations(self) -> dict[str, Operation]:
        return {"post": self._post, "remove": self._remove}

    def _post(self, message: Message) -> str:
        """The answer as JSON: for many agents, encoding each entry each time would be most of the work."""
        now, rdzv_id, entry = time.monotonic(), str(message["rdzv_id"]), message["entry"]
        forget_s = FORGET_FINISHED_S if entry["state"] == FINISHED else FORGET_S
        posted = Posted(rdzv_id, json.dumps(entry, separators=(",", ":")), now + forget_s)
        with self._lock:
            self._entries[rdzv_id, str(entry["id"])] = posted
            self._entries = {key: value for key, value in self._entries.items() if now < value.until}
            found = [value.text for value in self._entries.values() if value.rdzv_id == rdzv_id]
        return f'{{"entries":[{",".join(found)}]}}'

    def _remove(self, message: Message) -> Message:
        with self._lock:
            self._entries.pop((str(message["rdzv_id"]), str(message["id"])), None)
        return {}


def serve(address: str, port: int) -> None:
    """Hold a board for agents elsewhere, until this process is ended. Raises OSError if the port is taken."""
    operations: dict[str, Operation] = {"ping": lambda message: {"id": "board"}}
    operations |= BoardMemory().operations()
    Server(address, port, operations).serve_forever()


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


def parse_rdzv(text: str) -> Path | list[Endpoint]:
    """A folder, or HOST:PORT[,HOST:PORT...]. Raises ValueError, in one sentence."""
    endpoints = []
    for part in text.split(","):
        match = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^/:\s\[\]]+)):(\d{1,5})", part.strip())
        if not match or not 0 < int(match[3]) < 65536:
            break
        endpoints.append(Endpoint(match[1] or match[2], int(match[3])))
    else:
        return endpoints
    if "/" not in text or "\n" in text:
        raise ValueError(
            "--rdzv is HOST:PORT[,HOST:PORT...] or a folder that all nodes share, written with a slash, such"
            f" as ./rendezvous; got {text!r}"
        )
    return Path(os.path.abspath(text))
