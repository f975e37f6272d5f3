"""The few keys that the agents of a round share: in the memory of its leader, over JSON, with time limits.

Workers do not see it: they get a torch TCPStore that the leader's agent hosts.
"""

import json
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError

from mingpt.elastic.wire import Message, request

POLL_S = 0.05
REQUEST_TIMEOUT_S = 2.0
KEPT_ROUNDS = 2


class KeyMemory:
    """The leader's side: the operations `set`, `get` and `add`, for each round apart."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rounds: dict[str, dict[str, str]] = {}

    def operations(self) -> dict[str, Callable[[Message], Message]]:
        return {"set": self._set, "get": self._get, "add": self._add}

    def _keys(self, message: Message) -> dict[str, str]:
        keys = self._rounds.setdefault(str(message["round"]), {})
        while len(self._rounds) > KEPT_ROUNDS:
            del self._rounds[next(iter(self._rounds))]
        return keys

    def _set(self, message: Message) -> Message:
        with self._lock:
            self._keys(message)[str(message["key"])] = str(message["value"])
        return {}

    def _get(self, message: Message) -> Message:
        with self._lock:
            keys = self._keys(message)
            return {"values": [keys.get(str(key)) for key in message["keys"]]}

    def _add(self, message: Message) -> Message:
        with self._lock:
            keys, key, token = self._keys(message), str(message["key"]), f"add/{message['token']}"
            if token not in keys:  # else the answer was lost and the request repeated
                keys[key] = keys[token] = str(int(keys.get(key, "0")) + int(message["amount"]))
            return {"value": int(keys[token])}


def assigned_ranks(nprocs: Sequence[int]) -> dict[str, str]:
    """What torchrun's agents would ask each other for ranks, if it is known how many workers each node has.

    `nprocs` is in the order of the nodes' ranks; 0, not known, gives {}. Workers have one role.
    """
    if 0 in nprocs:
        return {}
    found, total = {}, sum(nprocs)
    for rank, nproc in enumerate(nprocs):
        base = sum(nprocs[:rank])
        info = {"role": "", "rank": rank, "local_world_size": nproc}
        found[f"torchelastic/role_info/{rank}"] = json.dumps(info)
        found[f"torchelastic/assigned_ranks/{rank}"] = json.dumps([base, total, base, total])
    return found


class RoundStore:
    """What torchrun's agent uses of a torch Store, so that a cut network cannot hang it.

    Once `is_over()`, because a member has left or died, nothing waits any more: `wait` and `add` return, and
    `get` raises DistStoreError. Keys in `known` are never asked for or changed: ranks are assigned where
    torchrun catches no error.
    """

    def __init__(
        self, address: str, port: int, round: str, is_over: Callable[[], bool], known: Mapping[str, str] = {}
    ) -> None:
        self.timeout = timedelta(seconds=60)
        self._known = known
        self._address, self._port, self._round, self._is_over = address, port, round, is_over

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str | bytes) -> None:
        if key in self._known:
            return
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        self._ask({"op": "set", "key": key, "value": text})

    def add(self, key: str, amount: int) -> int:
        return int(
            self._ask({"op": "add", "key": key, "amount": amount, "token": uuid.uuid4().hex}).get("value", 0)
        )

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        values = self._await(keys)
        if None in values:
            raise DistStoreError(f"a node was lost while the agents shared {', '.join(keys)}")
        return [str(value).encode("latin-1") for value in values]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._await(keys, timeout)

    def _await(self, keys: Sequence[str], timeout: timedelta | None = None) -> list[Any]:
        """Values once all are there, or what there is once the round is over. Raises DistStoreError."""
        deadline = time.monotonic() + (timeout or self.timeout).total_seconds()
        while True:
            values = self._values(keys)
            if None not in values or self._is_over():
                return values
            if time.monotonic() > deadline:
                raise DistStoreError(f"nobody has set {', '.join(keys)} in time")
            time.sleep(POLL_S)

    def _values(self, keys: Sequence[str]) -> list[Any]:
        if all(key in self._known for key in keys):
            return [self._known[key] for key in keys]
        return list(self._ask({"op": "get", "keys": list(keys)}).get("values", [None] * len(keys)))

    def _ask(self, message: Message) -> Message:
        """The leader's answer; {} once the round is over. Raises DistStoreError after the timeout."""
        deadline = time.monotonic() + self.timeout.total_seconds()
        while True:
            try:
                return request(self._address, self._port, message | {"round": self._round}, REQUEST_TIMEOUT_S)
            except OSError as error:
                if self._is_over():
                    return {}
                if time.monotonic() > deadline:
                    raise DistStoreError(f"{self._address}:{self._port} does not answer: {error}") from error
            time.sleep(POLL_S)
