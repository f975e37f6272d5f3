"""How the workers of a generation meet in the store that outlives them, and what the next one reads there.

Workers meet under keys that no earlier generation wrote. The agent's store outlives the workers, and with
several agents neither the restart count nor the port tells generations apart. So each worker offers a fresh
nonce, and rank 0 answers under that nonce with the generation's name: nothing that a dead worker left can be
mistaken for an answer.
"""

import json
import threading
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mingpt.distributed.launch import Launch

RENDEZVOUS_TIMEOUT_S = 180.0  # a worker may still be importing torch from a slow disk
AGENT_STORE_TIMEOUT_S = 10.0
EXIT_REASON_TIMEOUT_S = 2.0
POLL_S = 0.01
TIMED_OUT = "timed out waiting for a peer"
LOST_PEER = "lost a peer"


@dataclass(frozen=True)
class GenerationEnd:
    """How a generation ended, as its store says. A rank without an exit reason was killed or cut off."""

    world_size: int
    exit_reasons: dict[int, dict[str, Any]]  # rank -> {"why": ..., "step": ...}

    def step(self) -> int | None:
        """The last step that the generation had completed."""
        return max((reason["step"] for reason in self.exit_reasons.values()), default=None)

    def sentence(self) -> str:
        reasons = {rank: reason["why"] for rank, reason in self.exit_reasons.items()}
        missing = [rank for rank in range(self.world_size) if rank not in reasons]
        parts = []
        if missing:
            who = ("worker " if len(missing) == 1 else "workers ") + ", ".join(map(str, missing))
            timeouts = [why.removeprefix(TIMED_OUT) for why in reasons.values() if why.startswith(TIMED_OUT)]
            parts.append(f"{who} timed out{timeouts[0]}" if timeouts else f"{who} vanished")
        parts += [f"worker {rank} {why}" for rank, why in reasons.items() if why.startswith("failed")]
        if parts:
            return "; ".join(parts)
        if any(why.startswith(TIMED_OUT) for why in reasons.values()):
            return "the workers timed out waiting for each other"
        lost = [why for why in reasons.values() if why.startswith(LOST_PEER)]
        others = {f"the workers were {why}" for why in reasons.values() if why not in lost}
        return "; ".join(([f"the workers {max(lost, key=len)}"] if lost else []) + sorted(others))


class Rendezvous:
    """The job's store, seen from one worker. Raises TimeoutError if the others do not come."""

    def __init__(self, launch: Launch) -> None:
        from torch.distributed import PrefixStore

        self.launch = launch
        self._store = self._connect(is_host=launch.rank == 0 and not launch.agent_hosts_store)
        self._exit_store = self._connect(is_host=False)  # a client of its own: the main thread may be waiting
        self.generation = self._offer_nonce() if launch.rank else self._answer_nonces()
        self.process_group_store = PrefixStore(self.generation, self._store)
        self.previous_generation = self._replace_generation() if launch.rank == 0 else None

    def _connect(self, is_host: bool) -> Any:
        from torch.distributed import TCPStore

        assert self.launch.master_addr is not None
        # An agent's store is there already, or never will be: the agent died before this worker could notice.
        timeout_s = AGENT_STORE_TIMEOUT_S if self.launch.agent_hosts_store else RENDEZVOUS_TIMEOUT_S
        store = TCPStore(
            self.launch.master_addr,
            self.launch.master_port,
            is_master=is_host,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
        )
        store.set_timeout(timedelta(seconds=RENDEZVOUS_TIMEOUT_S))
        return store

    def _offer_nonce(self) -> str:
        """On ranks but 0: the generation's name."""
        nonce = uuid.uuid4().hex
        self._store.set(f"hello/{self.launch.rank}", nonce)
        name = str(self._store.get(f"answer/{nonce}").decode())  # waits for it
        self._store.set(f"{name}/here/{self.launch.rank}", "")
        return name

    def _answer_nonces(self) -> str:
        """On rank 0: answer every offer until all ranks have confirmed the generation's name."""
        store, name = self._store, uuid.uuid4().hex
        answered: dict[int, bytes] = {}
        missing = set(range(1, self.launch.world_size))
        deadline = time.monotonic() + RENDEZVOUS_TIMEOUT_S
        while missing:
            for rank in sorted(missing):
                has_offered = store.check([f"hello/{rank}"])
                if not has_offered:
                    continue
                offered = store.get(f"hello/{rank}")
                # The first offer may be a dead worker's; then another one follows.
                if answered.get(rank) != offered:
                    answered[rank] = offered
                    store.set(f"answer/{offered.decode()}", name)
            missing = {rank for rank in missing if not store.check([f"{name}/here/{rank}"])}
            if missing and time.monotonic() > deadline:
                raise TimeoutError(
                    f"workers {sorted(missing)} did not come within {RENDEZVOUS_TIMEOUT_S:g} s"
                )
            time.sleep(POLL_S if missing else 0)
        return name

    def _replace_generation(self) -> GenerationEnd | None:
        """On rank 0: how the last generation in this store ended; this one's name takes its place."""
        store, previous = self._store, None
        has_previous = store.check(["generation"])
        if has_previous:
            name, world_size = json.loads(store.get("generation"))
            reasons = {}
            for rank in range(world_size):
                key = exit_reason_key(name, rank)
                has_reason = store.check([key])
                if has_reason:
                    reasons[rank] = json.loads(store.get(key))
            previous = GenerationEnd(world_size, reasons)
        store.set("generation", json.dumps([self.generation, self.launch.world_size]))
        return previous

    def record_exit_reason(self, why: str, step: int, rank: int | None = None) -> None:
        """Tell the next generation why this or another rank exits after `step`; the first reason counts."""
        rank = self.launch.rank if rank is None else rank
        entry = (exit_reason_key(self.generation, rank), "", json.dumps({"why": why, "step": step}))
        # In a thread with a time limit: the store may have died with its agent, or be unreachable.
        writing = threading.Thread(target=compare_set, args=(self._exit_store, entry), daemon=True)
        writing.start()
        writing.join(EXIT_REASON_TIMEOUT_S)

    def was_started(self) -> bool:
        """Whether an earlier generation of this job had passed its checks, as far as this rank knows."""
        # Only the agent's store outlives generations; otherwise the agent's restart count has to do.
        if self.launch.agent_hosts_store:
            return bool(self._store.check(["started"]))
        return self.launch.restart_count > 0

    def mark_started(self) -> None:
        self._store.set("started", "")


def exit_reason_key(generation: str, rank: int) -> str:
    return f"{generation}/exit_reason/{rank}"


def compare_set(store: Any, entry: tuple[str, str, str]) -> None:
    from torch.distributed import DistError

    try:
        store.compare_set(*entry)
    except DistError:
        pass  # the store is gone, and with it the generation that would read this
