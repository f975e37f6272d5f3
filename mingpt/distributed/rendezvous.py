"""How the workers of a generation meet in the store that outlives them, and what the next one reads there.

Workers meet under keys that no earlier generation wrote. The agent's store outlives the workers, and with
several agents neither the restart count nor the port tells generations apart. So each worker offers a fresh
nonce, and rank 0 answers under that nonce with the generation's name: nothing that a dead worker left can be
mistaken for an answer.
"""

import json
import os
import platform
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

from mingpt.distributed import peers
from mingpt.distributed.generation import (
    MAX_REPEATS,
    GenerationEnd,
    PeerEnd,
    repeated_failure,
    repeated_sentence,
)
from mingpt.distributed.launch import Launch
from mingpt.errors import PeersMissing

T = TypeVar("T")
STORE_TIMEOUT_S = 180.0  # of what else the process group waits for in the store
AGENT_STORE_TIMEOUT_S = 10.0
EXIT_REASON_TIMEOUT_S = 2.0
PEER_END_TIMEOUT_S = 0.3
POLL_S = 0.01


class Rendezvous:
    """The job's store, seen from one worker.

    Raises PeersMissing, after killing those of this node, if the others do not come within `timeout_s`.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        from torch.distributed import PrefixStore

        self.launch, self.timeout_s = launch, timeout_s
        self.has_begun = False  # whether this worker has begun to train
        self.repeated_failure: str | None = None  # on rank 0: why another start would be of no use
        self.missing_workers: str | None = None  # on rank 0: who did not reach the rendezvous before this one
        self._deadline = time.monotonic() + timeout_s
        self._store = self._connect(is_host=launch.rank == 0 and not launch.agent_hosts_store)
        self._exit_store = self._connect(is_host=False)  # a client of its own: the main thread may be waiting
        self.generation = self._offer_nonce() if launch.rank else self._answer_nonces()
        self.process_group_store = PrefixStore(self.generation, self._store)
        self.previous_generation = self._replace_generation() if launch.rank == 0 else None
        self.local_peer_pidfds = self._open_local_peers()

    def _connect(self, is_host: bool) -> Any:
        from torch.distributed import DistError, TCPStore

        assert self.launch.master_addr is not None
        # An agent's store is there already, or never will be: the agent died before this worker could notice.
        timeout_s = AGENT_STORE_TIMEOUT_S if self.launch.agent_hosts_store else self.timeout_s
        try:
            store = TCPStore(
                self.launch.master_addr,
                self.launch.master_port,
                is_master=is_host,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except DistError:
            if self.launch.agent_hosts_store or is_host or time.monotonic() < self._deadline - 1.0:
                raise
            self._give_up([0], can_tell=False)
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return store

    def _offer_nonce(self) -> str:
        """On ranks but 0: the generation's name, once all ranks have it."""
        store, nonce = self._store, uuid.uuid4().hex
        store.set(f"hello/{self.launch.rank}", nonce)
        self._wait_for(f"answer/{nonce}", lambda: [0])
        name = str(store.get(f"answer/{nonce}").decode())
        store.set(member_key(name, self.launch.rank), self._location())
        # Nobody goes on before all have come: who waits here can tell who is missing.
        self._wait_for(f"{name}/complete", lambda: self._waited_for(name))
        return name

    def _answer_nonces(self) -> str:
        """On rank 0: answer every offer until all ranks have confirmed the generation's name."""
        store, name = self._store, uuid.uuid4().hex
        store.set(member_key(name, 0), self._location())
        answered: dict[int, bytes] = {}
        missing = self._missing(name)
        while missing:
            for rank in missing:
                has_offered = store.check([f"hello/{rank}"])
                if not has_offered:
                    continue
                offered = store.get(f"hello/{rank}")
                # The first offer may be a dead worker's; then another one follows.
                if answered.get(rank) != offered:
                    answered[rank] = offered
                    store.set(f"answer/{offered.decode()}", name)
            missing = self._missing(name)
            if missing and time.monotonic() > self._deadline:
                self._give_up(missing)
            time.sleep(POLL_S if missing else 0)
        store.set(f"{name}/complete", "")
        return name

    def _location(self) -> str:
        return json.dumps([self.launch.node_rank, os.getpid()])

    def _missing(self, name: str) -> list[int]:
        """Ranks that have not confirmed the generation's name."""
        ranks = range(self.launch.world_size)
        return [rank for rank in ranks if not self._store.check([member_key(name, rank)])]

    def _waited_for(self, name: str) -> list[int]:
        """Who keeps the ranks from meeting: rank 0 if it leaves an offer unanswered, else who is missing."""
        store, missing = self._store, self._missing(name)
        for rank in missing:
            has_offered = store.check([f"hello/{rank}"])
            if has_offered:
                nonce = store.get(f"hello/{rank}").decode()
                is_answered = store.check([f"answer/{nonce}"])  # so is what a dead worker left
                if not is_answered:
                    return [0]
        return missing or [0]

    def _wait_for(self, key: str, find_missing: Callable[[], Sequence[int]]) -> None:
        is_there = self._store.check([key])
        while not is_there:
            if time.monotonic() > self._deadline:
                self._give_up(find_missing())
            time.sleep(POLL_S)
            is_there = self._store.check([key])

    def _give_up(self, missing: Sequence[int], can_tell: bool = True) -> NoReturn:
        """Kill the missing workers of this node, as the agent would after 30 s, and record who they are."""
        for rank, pidfd in peers.find_local_peers(self.launch.agent_pid).items():
            if rank in missing:
                peers.kill(pidfd)
        sentence = (
            f"{list_workers(missing)} did not reach the rendezvous within {round(self.timeout_s, 1):g} s"
        )
        if can_tell:
            self._store.compare_set("missing_workers", "", sentence)
        raise PeersMissing(sentence)

    def _replace_generation(self) -> GenerationEnd | None:
        """On rank 0: how the last generation in this store ended; this one's name takes its place."""
        store, previous = self._store, None
        has_previous = store.check(["generation"])
        if has_previous:
            name, world_size, round = json.loads(store.get("generation"))
            # With another leader in between, this store knows nothing of the generation before.
            if round is None or round + 1 == self.launch.round:
                previous = GenerationEnd(world_size, self._read_exit_reasons(name, world_size))
                self.repeated_failure = repeated_failure(self._note_end(previous))
        store.set("generation", json.dumps([self.generation, self.launch.world_size, self.launch.round]))
        has_missing = store.check(["missing_workers"])
        if has_missing:
            self.missing_workers = store.get("missing_workers").decode()
            store.delete_key("missing_workers")
        return previous

    def _read_exit_reasons(self, name: str, world_size: int) -> dict[int, dict[str, Any]]:
        """{rank: reason} of those that have recorded one."""
        reasons = {}
        for rank in range(world_size):
            key = exit_reason_key(name, rank)
            has_reason = self._store.check([key])
            if has_reason:
                reasons[rank] = json.loads(self._store.get(key))
        return reasons

    def _note_end(self, end: GenerationEnd) -> list[GenerationEnd]:
        """How the last generations ended, this one included."""
        has_ends = self._store.check(["ends"])
        ends = json.loads(self._store.get("ends")) if has_ends else []
        ends = [*ends, end.to_json()][-MAX_REPEATS:]
        self._store.set("ends", json.dumps(ends))
        return [GenerationEnd.from_json(entry) for entry in ends]

    def _open_local_peers(self) -> dict[int, int]:
        """{rank: pidfd} of our agent's other workers."""
        found: dict[int, int] = {}
        if self.launch.agent_pid is None:
            return found
        ranks = range(self.launch.world_size)
        places = self._store.multi_get([member_key(self.generation, rank) for rank in ranks])
        for rank, place in enumerate(places):
            node_rank, pid = json.loads(place)
            if node_rank == self.launch.node_rank:
                pidfd = peers.open_pidfd(pid, self.launch.agent_pid)
                if pidfd is not None:
                    found[rank] = pidfd
        return found

    def record_exit_reason(self, why: str, step: int, rank: int | None = None, agreed: bool = False) -> None:
        """Tell the next generation why this or another rank exits after `step`; the first reason counts."""
        rank = self.launch.rank if rank is None else rank
        content = {"why": why, "step": step, "agreed": agreed, "began": self.has_begun}
        key = exit_reason_key(self.generation, rank)
        within(
            EXIT_REASON_TIMEOUT_S, lambda: self._exit_store.compare_set(key, "", json.dumps(content)), None
        )

    def read_exit_reason(self, rank: int) -> tuple[bool, dict[str, Any] | None]:
        """Whether the store answers in time, and a rank's exit reason if it has recorded one."""
        key = exit_reason_key(self.generation, rank)

        def read() -> tuple[bool, dict[str, Any] | None]:
            has_reason = self._exit_store.check([key])
            return True, json.loads(self._exit_store.get(key)) if has_reason else None

        unknown: tuple[bool, dict[str, Any] | None] = (False, None)
        return within(PEER_END_TIMEOUT_S, read, unknown)

    def how_peer_ended(self, rank: int) -> PeerEnd | None:
        """How a rank of this generation ended that is known to have exited; None if the store is silent."""
        answers, reason = self.read_exit_reason(rank)
        return PeerEnd.of(reason) if answers else None

    def is_leaving(self, rank: int) -> bool:
        """Whether a rank of this generation has recorded why it exits."""
        return self.read_exit_reason(rank)[1] is not None

    def was_started(self) -> bool:
        """Whether an earlier generation of this job had passed its checks, as far as this rank knows."""
        # Only the agent's store outlives generations; otherwise the agent's restart count has to do.
        if self.launch.agent_hosts_store:
            return bool(self._store.check(["started"]))
        return self.launch.restart_count > 0

    def mark_started(self) -> None:
        self._store.set("started", "")


def note_failed_start(launch: Launch, why: str) -> str | None:
    """Count a failure before this worker could meet the others, its import of a module say.

    Returns one sentence if this agent's workers failed so in the last generations, one after the other, and
    this worker is the first of its generation to say so.
    """
    if launch.agent_pid is None or not launch.agent_hosts_store or launch.master_addr is None:
        return None
    try:
        from torch.distributed import TCPStore

        limit = timedelta(seconds=AGENT_STORE_TIMEOUT_S)
        store = TCPStore(
            launch.master_addr, launch.master_port, is_master=False, wait_for_workers=False, timeout=limit
        )
        # Of one agent: its count of restarts is that of its own workers.
        prefix = f"failed_start/{platform.node()}/{launch.agent_pid}"
        store.set(f"{prefix}/{launch.restart_count}", why)
        counts = range(launch.restart_count - MAX_REPEATS + 1, launch.restart_count + 1)
        is_repeated = store.check([f"{prefix}/{count}" for count in counts])
        if not is_repeated:
            return None
        me = str(os.getpid())
        first = store.compare_set(f"{prefix}/said", "", me).decode()
    except Exception:  # torch or the store is what fails here: the failure is reported, only not counted
        return None
    return repeated_sentence("before the first step", f"worker {launch.rank} {why}") if first == me else None


def exit_reason_key(generation: str, rank: int) -> str:
    return f"{generation}/exit_reason/{rank}"


def member_key(generation: str, rank: int) -> str:
    return f"{generation}/here/{rank}"


def list_workers(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def within(timeout_s: float, work: Callable[[], T], otherwise: T) -> T:
    """The result of `work` on a store that may have died with its agent, or be unreachable."""
    from torch.distributed import DistError

    results: list[T] = []

    def run() -> None:
        try:
            results.append(work())
        except DistError:
            pass  # the store is gone, and with it the generation that would read this

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_s)
    return results[0] if results else otherwise
