"""The rendezvous of workers in the job's store (a TCPStore), and the exit reasons that they leave there.

A generation is the workers from one start or restart to the next. The agent's store outlives a generation,
and with several agents neither the restart count nor the port tells generations apart. So rank 0 draws a
random name for the generation; the keys of exit reasons, for example, begin with this name. Each other rank
writes a fresh nonce (a random text) to the store. Rank 0 answers with the name, under a key made of the
nonce. So the answer to a dead worker's nonce misleads no other worker.

A new generation reads the exit reasons of the previous generation, if the store has them, to report them.
"""

import contextlib
import json
import platform
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

from mingpt.base.errors import PeersMissing, UserError
from mingpt.base.system import run_within
from mingpt.distributed.ends import ExitReason, GenerationEnd, list_workers
from mingpt.distributed.launch import Launch

STORE_TIMEOUT_S = 180.0  # for the process group's own waits in the store
AGENT_STORE_TIMEOUT_S = 10.0
EXIT_REASON_TIMEOUT_S = 2.0
PEER_END_TIMEOUT_S = 0.3
POLL_S = 0.01


class Rendezvous:
    """A worker's connection to the job's TCPStore.

    Constructing it waits until all workers are connected; this is collective. If no agent hosts the store,
    rank 0 does. Raises PeersMissing if other workers do not arrive within `timeout_s` seconds, and DistError
    if the store fails, for example because rank 0, its host, has already given up. But without any agent,
    rank 0 raises UserError if it cannot listen at MASTER_PORT.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        from torch.distributed import PrefixStore

        self.launch, self.timeout_s = launch, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._store = self._connect(is_host=launch.rank == 0 and not launch.agent_hosts_store)
        self._exit_store = self._connect(is_host=False)  # for use while the main thread waits in `_store`
        self.generation = self._offer_nonce() if launch.rank else self._answer_nonces()
        self.process_group_store = PrefixStore(self.generation, self._store)
        ended = json.loads(self._store.get(complete_key(self.generation)))
        self.previous_generation = GenerationEnd(*ended) if ended else None

    def _connect(self, is_host: bool) -> Any:
        from torch.distributed import DistError, TCPStore

        launch = self.launch
        assert launch.master_addr is not None
        # An agent's store exists already, or never will: the agent died before this worker could notice.
        timeout_s = AGENT_STORE_TIMEOUT_S if launch.agent_hosts_store else self.timeout_s
        try:
            store = TCPStore(
                launch.master_addr,
                launch.master_port,
                is_master=is_host,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except DistError as error:
            if is_host and launch.agent_pid is None:
                raise UserError(
                    f"worker 0 cannot listen at port {launch.master_port} (MASTER_PORT) of "
                    f"{platform.node()}: {str(error).splitlines()[0]}"
                ) from None
            has_waited = time.monotonic() > self._deadline - 1.0  # TCPStore may give up a little early
            if has_waited and not launch.agent_hosts_store and not is_host:
                self._give_up([0])
            raise
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return store

    def _offer_nonce(self) -> str:
        """Write a nonce for rank 0; return the generation's name once all ranks know the name.

        All ranks but 0 call this.
        """
        store, nonce = self._store, uuid.uuid4().hex
        store.set(f"hello/{self.launch.rank}", nonce)
        self._wait_for(f"answer/{nonce}")
        name = str(store.get(f"answer/{nonce}").decode())
        store.set(member_key(name, self.launch.rank), "")
        # No rank goes on before all have arrived, because a rank that waits can tell which ranks are missing.
        self._wait_for(complete_key(name), name)
        return name

    def _answer_nonces(self) -> str:
        """On rank 0, answer the other ranks' nonces until all ranks have confirmed the generation's name.

        Then calls `_replace_generation`, and returns the name. Raises PeersMissing at the deadline.
        """
        store, name = self._store, uuid.uuid4().hex
        store.set(member_key(name, 0), "")
        answered: dict[int, bytes] = {}
        missing = self._missing(name)
        while missing:
            for rank in missing:
                offered = read_key(store, f"hello/{rank}")
                if offered is None:
                    continue
                # The first nonce may be that of a dead worker; then another nonce follows.
                if answered.get(rank) != offered:
                    answered[rank] = offered
                    store.set(f"answer/{offered.decode()}", name)
            missing = self._missing(name)
            if missing and time.monotonic() > self._deadline:
                self._give_up(missing)
            time.sleep(POLL_S if missing else 0)
        self._replace_generation(name)
        return name

    def _missing(self, name: str) -> list[int]:
        """Return the ranks that have not confirmed `name`, the generation's name."""
        ranks = range(self.launch.world_size)
        return [rank for rank in ranks if not self._store.check([member_key(name, rank)])]

    def _waited_for(self, name: str) -> list[int]:
        """Return the late ranks: all ranks that have not confirmed `name`, the generation's name.

        Returns [0] if one of these ranks has written a nonce that has no answer, or if all ranks have
        confirmed.
        """
        store, missing = self._store, self._missing(name)
        for rank in missing:
            offered = read_key(store, f"hello/{rank}")
            if offered is not None:
                # The nonce may be that of a dead worker, and has an answer then.
                is_answered = store.check([f"answer/{offered.decode()}"])
                if not is_answered:
                    return [0]
        return missing or [0]

    def _wait_for(self, key: str, name: str = "") -> None:
        """Wait until rank 0 has set `key`. Raises PeersMissing at the deadline.

        `name` is the generation's name, or "" if this rank does not know the name yet. With the name, the
        error lists the ranks of `_waited_for`; without the name, it lists rank 0.
        """
        is_there = self._store.check([key])
        while not is_there:
            if time.monotonic() > self._deadline:
                self._give_up(self._waited_for(name) if name else [0])
            time.sleep(POLL_S)
            is_there = self._store.check([key])

    def _give_up(self, missing: Sequence[int]) -> NoReturn:
        raise PeersMissing(
            f"{list_workers(missing)} did not reach the rendezvous within {round(self.timeout_s, 1):g} s",
            missing,
        )

    def _replace_generation(self, name: str) -> None:
        """Tell all ranks that the new generation, `name`, is complete, and how the previous generation ended.

        The previous generation is the newest one in the store. Its end is left out if its round
        (`Launch.rdzv_round`) is known, and not the one before the new one's. Only rank 0 calls this.
        """
        store, launch, ended = self._store, self.launch, None
        found = read_generation_end(store)
        # If another node hosted the store in between, this store does not know the previous generation.
        if found and (found[1] is None or found[1] + 1 == launch.rdzv_round):
            ended = [found[0].exit_reasons, found[0].name]
        store.set("generation", json.dumps([name, launch.world_size, launch.rdzv_round]))
        store.set(complete_key(name), json.dumps(ended))

    def record_exit_reason(self, rank: int, reason: ExitReason) -> None:
        """Store `reason` in the job's TCPStore, unless `rank` already has an exit reason there.

        Never raises: if the store does not answer in time, the exit reason may be missing.
        """
        key, content = exit_reason_key(self.generation, rank), json.dumps(reason)
        with contextlib.suppress(Exception):  # if the store is gone, no later generation reads the reason
            run_within(EXIT_REASON_TIMEOUT_S, lambda: self._exit_store.compare_set(key, "", content))

    def read_exit_reason(self, rank: int) -> tuple[bool, ExitReason | None]:
        """Return (whether the job's TCPStore answers in time, the exit reason that `rank` stored there).

        The exit reason is None if the rank stored none, or if the store does not answer.
        """
        try:
            return True, run_within(
                PEER_END_TIMEOUT_S, lambda: read_exit_reason(self._exit_store, self.generation, rank)
            )
        except Exception:  # the store may be gone
            return False, None

    def is_restart(self) -> bool:
        """Return whether a call of `mark_started` is recorded in the job's TCPStore.

        If no agent hosts the store, return whether the restart count is above 0.
        """
        # Only an agent's store outlives generations.
        if self.launch.agent_hosts_store:
            return bool(self._store.check(["started"]))
        return self.launch.restart_count > 0

    def mark_started(self) -> None:
        self._store.set("started", "")


def read_generation_end(store: Any) -> tuple[GenerationEnd, int | None] | None:
    """Return how the newest generation in a job's TCPStore ended, and that generation's `Launch.rdzv_round`.

    Returns None, not a pair, if no generation is in the store.
    """
    last = read_key(store, "generation")
    if last is None:
        return None
    name, world_size, rdzv_round = json.loads(last)
    reasons = [read_exit_reason(store, name, rank) for rank in range(world_size)]
    return GenerationEnd(reasons, name), rdzv_round


def read_key(store: Any, key: str) -> bytes | None:
    """Return the value of a key in a TCPStore, or None if the key is not set.

    `store.get` by itself would wait until the key is set.
    """
    is_set = store.check([key])
    return store.get(key) if is_set else None


def exit_reason_key(generation: str, rank: int) -> str:
    return f"{generation}/exit_reason/{rank}"


def read_exit_reason(store: Any, generation: str, rank: int) -> ExitReason | None:
    """Return the exit reason that `rank` of `generation` stored in a TCPStore; None if it stored none."""
    content = read_key(store, exit_reason_key(generation, rank))
    return None if content is None else json.loads(content)


def complete_key(generation: str) -> str:
    return f"{generation}/complete"


def member_key(generation: str, rank: int) -> str:
    return f"{generation}/here/{rank}"
