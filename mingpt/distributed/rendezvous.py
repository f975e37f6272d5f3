"""The rendezvous of a generation's workers in the job's store, and the exit reasons they record there.

Apart from their offers, workers meet under keys that no earlier generation wrote. The agent's store outlives
the workers, and with several agents neither the restart count nor the port tells generations apart. So each
worker offers a fresh nonce, and rank 0 answers under that nonce with the generation's name: an answer to a
dead worker's offer, which may still be there, cannot be mistaken for one's own.

The next generation reads the exit reasons of the previous one, to tell how that ended. A worker finds the
other workers of its agent in /proc, and watches and kills them by pidfd, on Linux only.
"""

import contextlib
import json
import os
import platform
import re
import select
import signal
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from mingpt.base.errors import PeersMissing, UserError
from mingpt.base.system import run_within
from mingpt.distributed.launch import Launch

TIMED_OUT = "timed out waiting for a peer after"
LOST_PEER = "lost a peer"
FAILED = "failed"
TOLD = "told to stop"
MAX_REPEATS = 3  # consecutive generations that fail in the same place
T = TypeVar("T")
STORE_TIMEOUT_S = 180.0  # for the process group's own waits in the store
AGENT_STORE_TIMEOUT_S = 10.0
EXIT_REASON_TIMEOUT_S = 2.0
PEER_END_TIMEOUT_S = 0.3
POLL_S = 0.01


def parent_pid(pid: int) -> int | None:
    """Return the process id of a process's parent; None if the process is gone or there is no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None


def find_local_peers(agent_pid: int | None) -> dict[int, int]:
    """Return {rank: new pidfd} of the agent's other children with a rank; {} without an agent or pidfds."""
    found: dict[int, int] = {}
    if agent_pid is None or not hasattr(os, "pidfd_open"):
        return found
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        is_peer = pid != os.getpid() and parent_pid(pid) == agent_pid
        rank = rank_of(pid) if is_peer else None
        if rank is not None:
            with contextlib.suppress(OSError):  # it is gone, or this kernel refuses: then the agent kills it
                found[rank] = os.pidfd_open(pid)
    return found


def rank_of(pid: int) -> int | None:
    """Return RANK in a process's environment; None if there is none or the environment cannot be read."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    ranks = [int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")]
    return ranks[0] if ranks else None


def wait_readable(fds: Mapping[int, int], timeout_s: float) -> list[int]:
    """Wait at most `timeout_s` until one of {key: file descriptor} is readable; return the keys that are.

    A pidfd is readable once its process has exited.
    """
    poller = select.poll()
    keys = {fd: key for key, fd in fds.items()}
    for fd in keys:
        poller.register(fd, select.POLLIN)
    return [keys[fd] for fd, _ in poller.poll(1000 * timeout_s)]


def kill_by_pidfd(pidfd: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(OSError):  # it has exited
        signal.pidfd_send_signal(pidfd, number)


class PeerEnd(Enum):
    """The meaning of a worker's exit for the workers of its generation that still run."""

    AGREED = "the job ends, or all workers leave for the same reason"
    STOPPED = "it was told to stop by a signal that could not wait for the others"
    LOST = "it failed, or was killed"

    @classmethod
    def of(cls, reason: dict[str, Any] | None) -> "PeerEnd":
        """Return the end that an exit reason describes; `reason` is None if the worker recorded none."""
        if reason is None:
            return cls.LOST
        if reason.get("agreed"):
            return cls.AGREED
        return cls.STOPPED if reason["why"].startswith(TOLD) else cls.LOST


@dataclass(frozen=True)
class GenerationEnd:
    """A generation's end by its exit reasons. A rank without one was killed or cut off from the store."""

    world_size: int
    exit_reasons: dict[int, dict[str, Any]]  # rank -> {"why": ..., "step": ...}
    name: str = ""

    @classmethod
    def from_json(cls, ended: list[Any]) -> "GenerationEnd":
        """Return the end from its fields as JSON has them, with the ranks as texts."""
        world_size, reasons, name = ended
        return cls(world_size, {int(rank): reason for rank, reason in reasons.items()}, name)

    def step(self) -> int | None:
        """Return the latest step that a worker recorded when it exited; None without any exit reason."""
        return max((reason["step"] for reason in self.exit_reasons.values()), default=None)

    def sentence(self, stacks: Path | None = None) -> str:
        """Return the end as a sentence, after a timeout with the lines where workers hung (from `stacks`)."""
        reasons = {rank: reason["why"] for rank, reason in self.exit_reasons.items()}
        missing = [rank for rank in range(self.world_size) if rank not in reasons]
        parts = []
        timeouts = [why.removeprefix(TIMED_OUT) for why in reasons.values() if why.startswith(TIMED_OUT)]
        paths = [stack_path(stacks, self.name, rank) for rank in (missing or reasons)] if stacks else []
        places = dict.fromkeys(stuck_place(path) for path in paths if timeouts and path.exists())
        where = f": {'; '.join(places)}" if places else ""
        if missing:
            what = f"did not answer for{timeouts[0]}{where}" if timeouts else "vanished"
            parts.append(f"{list_workers(missing)} {what}")
        parts += [f"worker {rank} {why}" for rank, why in reasons.items() if why.startswith(FAILED)]
        if parts:
            return "; ".join(parts)
        lost = [why for why in reasons.values() if why.startswith(LOST_PEER)]
        others = {passive(why) for why in reasons.values() if why not in lost}
        return "; ".join(([f"the workers {max(lost, key=len)}"] if lost else []) + sorted(others)) + where


def passive(why: str) -> str:
    """Return a clause on an exit reason, such as "the workers were told to stop by SIGTERM"."""
    return f"the workers were {why}" if why.startswith((TOLD, "stopped")) else f"the workers {why}"


def is_loss(reason: Mapping[str, Any]) -> bool:
    """Return whether, by its exit reason, a worker left because another one was gone or silent."""
    return reason["why"].startswith((LOST_PEER, TIMED_OUT))


def repeated_sentence(where: str, end: str) -> str:
    repeats = f"{MAX_REPEATS} generations failed one after the other {where} ({end})"
    return f"{repeats}: a restart would repeat it"


class Rendezvous:
    """A worker's connection to the job's store. Constructing it is collective: all workers meet there.

    Raises PeersMissing if other workers, such as the store's host, do not arrive within `timeout_s`; those
    missing of this agent are killed first. Raises UserError if rank 0, without an agent, cannot listen at its
    port, and DistError if the store fails otherwise.
    """

    def __init__(self, launch: Launch, timeout_s: float) -> None:
        from torch.distributed import PrefixStore

        self.launch, self.timeout_s = launch, timeout_s
        self.missing_workers: str | None = None  # on rank 0: the workers that the last rendezvous lacked
        self._deadline = time.monotonic() + timeout_s
        self._store = self._connect(is_host=launch.rank == 0 and not launch.agent_hosts_store)
        self._exit_store = self._connect(is_host=False)  # a second client: the main thread may be waiting
        self.generation = self._offer_nonce() if launch.rank else self._answer_nonces()
        self.process_group_store = PrefixStore(self.generation, self._store)
        ended = json.loads(self._store.get(complete_key(self.generation)))
        self.previous_generation = GenerationEnd.from_json(ended) if ended else None
        self.local_peer_pidfds = find_local_peers(launch.agent_pid)

    def _connect(self, is_host: bool) -> Any:
        from torch.distributed import DistError, TCPStore

        assert self.launch.master_addr is not None
        # An agent's store exists already, or never will: the agent died before this worker could notice.
        timeout_s = AGENT_STORE_TIMEOUT_S if self.launch.agent_hosts_store else self.timeout_s
        try:
            store = TCPStore(
                self.launch.master_addr,
                self.launch.master_port,
                is_master=is_host,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except DistError as error:
            if is_host and self.launch.agent_pid is None:
                raise UserError(
                    f"worker 0 cannot listen at port {self.launch.master_port} (MASTER_PORT) of "
                    f"{platform.node()}: {str(error).splitlines()[0]}"
                ) from None
            if self.launch.agent_hosts_store or is_host or time.monotonic() < self._deadline - 1.0:
                raise
            self._give_up([0], can_tell=False)
        store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))
        return store

    def _offer_nonce(self) -> str:
        """Offer a nonce, on ranks other than 0. Return the generation's name once all ranks have it."""
        store, nonce = self._store, uuid.uuid4().hex
        store.set(f"hello/{self.launch.rank}", nonce)
        self._wait_for(f"answer/{nonce}", lambda: [0])
        name = str(store.get(f"answer/{nonce}").decode())
        store.set(member_key(name, self.launch.rank), "")
        # No rank goes on before all have arrived: a waiting rank can tell which ranks are missing.
        self._wait_for(complete_key(name), lambda: self._waited_for(name))
        return name

    def _answer_nonces(self) -> str:
        """Answer offers, on rank 0, until all ranks have confirmed the generation's name; return the name."""
        store, name = self._store, uuid.uuid4().hex
        store.set(member_key(name, 0), "")
        answered: dict[int, bytes] = {}
        missing = self._missing(name)
        while missing:
            for rank in missing:
                offered = read_key(store, f"hello/{rank}")
                if offered is None:
                    continue
                # The first offer may come from a dead worker; then another offer follows.
                if answered.get(rank) != offered:
                    answered[rank] = offered
                    store.set(f"answer/{offered.decode()}", name)
            missing = self._missing(name)
            if missing and time.monotonic() > self._deadline:
                self._give_up(missing)
            time.sleep(POLL_S if missing else 0)
        ended = self._replace_generation(name)
        store.set(complete_key(name), json.dumps(ended))
        return name

    def _missing(self, name: str) -> list[int]:
        """Return the ranks that have not confirmed the generation's name."""
        ranks = range(self.launch.world_size)
        return [rank for rank in ranks if not self._store.check([member_key(name, rank)])]

    def _waited_for(self, name: str) -> list[int]:
        """Return the ranks that all wait for: those missing; rank 0 if none is, or if it ignores an offer."""
        store, missing = self._store, self._missing(name)
        for rank in missing:
            offered = read_key(store, f"hello/{rank}")
            if offered is not None:
                is_answered = store.check([f"answer/{offered.decode()}"])  # a dead worker's offer is, too
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
        """Kill missing workers of this agent, and raise PeersMissing.

        If `can_tell` (the store can be reached), first record the missing ranks for the next generation.
        """
        for rank, pidfd in find_local_peers(self.launch.agent_pid).items():
            if rank in missing:
                kill_by_pidfd(pidfd)
        sentence = (
            f"{list_workers(missing)} did not reach the rendezvous within {round(self.timeout_s, 1):g} s"
        )
        if can_tell:
            self._store.compare_set("missing_workers", "", sentence)
        raise PeersMissing(sentence)

    def _replace_generation(self, name: str) -> list[Any] | None:
        """Record, on rank 0, that this generation is `name`.

        Returns the end of the previous generation as `GenerationEnd`'s JSON; None if it is not known.
        """
        store, ended = self._store, None
        last = read_key(store, "generation")
        if last is not None:
            before, world_size, round = json.loads(last)
            # If another node led in between, this store has no entry of the previous generation.
            if round is None or round + 1 == self.launch.round:
                found = {rank: read_exit_reason(store, before, rank) for rank in range(world_size)}
                reasons = {rank: reason for rank, reason in found.items() if reason is not None}
                ended = [world_size, reasons, before]
        store.set("generation", json.dumps([name, self.launch.world_size, self.launch.round]))
        missing = read_key(store, "missing_workers")
        if missing is not None:
            self.missing_workers = missing.decode()
            store.delete_key("missing_workers")
        return ended

    def record_exit_reason(self, why: str, step: int, rank: int, agreed: bool = False) -> None:
        """Record in the store, if it answers in time, why a rank exits after `step`; a first reason stays."""
        content = {"why": why, "step": step, "agreed": agreed}
        key = exit_reason_key(self.generation, rank)
        within(
            EXIT_REASON_TIMEOUT_S, lambda: self._exit_store.compare_set(key, "", json.dumps(content)), None
        )

    def read_exit_reason(self, rank: int) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the store answers in time, and the exit reason of a rank, None if there is none."""
        unknown: tuple[bool, dict[str, Any] | None] = (False, None)
        return within(
            PEER_END_TIMEOUT_S,
            lambda: (True, read_exit_reason(self._exit_store, self.generation, rank)),
            unknown,
        )

    def was_started(self) -> bool:
        """Return whether an earlier generation passed its checks, or, without an agent's store, was there."""
        # Only the agent's store outlives generations; without it the agent's restart count is used.
        if self.launch.agent_hosts_store:
            return bool(self._store.check(["started"]))
        return self.launch.restart_count > 0

    def mark_started(self) -> None:
        self._store.set("started", "")


def note_failed_start(launch: Launch, why: str) -> str | None:
    """Count a failure of this worker before the rendezvous, in an import for example.

    Returns a sentence if workers of this agent failed like this in each of the last MAX_REPEATS generations,
    and no other worker of the agent has reported it. Returns None otherwise, and without an agent's store.
    """
    if launch.agent_pid is None or not launch.agent_hosts_store or launch.master_addr is None:
        return None
    try:
        from torch.distributed import TCPStore

        store = TCPStore(
            launch.master_addr,
            launch.master_port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=AGENT_STORE_TIMEOUT_S),
        )
        # The count is per agent, since an agent counts the restarts of its own workers.
        prefix = f"failed_start/{platform.node()}/{launch.agent_pid}"
        store.set(f"{prefix}/{launch.restart_count}", why)
        counts = range(launch.restart_count - MAX_REPEATS + 1, launch.restart_count + 1)
        is_repeated = store.check([f"{prefix}/{count}" for count in counts])
        if not is_repeated:
            return None
        is_first = store.add(f"{prefix}/said", 1) == 1
    except Exception:  # torch or the store fails: the failure is reported, but not counted
        return None
    return repeated_sentence("before the first step", f"worker {launch.rank} {why}") if is_first else None


def read_key(store: Any, key: str) -> bytes | None:
    """Return the value of a key in a store, or None if the key is not set; `store.get` would wait for it."""
    is_set = store.check([key])
    return store.get(key) if is_set else None


def exit_reason_key(generation: str, rank: int) -> str:
    return f"{generation}/exit_reason/{rank}"


def read_exit_reason(store: Any, generation: str, rank: int) -> dict[str, Any] | None:
    """Return the exit reason that a rank recorded by Rendezvous.record_exit_reason; None without one."""
    content = read_key(store, exit_reason_key(generation, rank))
    return None if content is None else json.loads(content)


def stuck_place(stacks: Path) -> str:
    """Return where the main thread is, by a file of stacks, as "FILE:LINE in FUNCTION".

    This is the innermost line outside libraries, if there is one. Without stacks, a clause says so.
    """
    # SIGUSR2's stacks have no such title: they tell where the process was at that time.
    _, was_stuck, dump = stacks.read_text(errors="replace").rpartition("Timeout (")
    main_thread = dump.rpartition("hread 0x")[2] if was_stuck else ""  # the last thread
    frames = re.findall(r'File "(.+)", line (\d+) in (.+)', main_thread)
    own = [frame for frame in frames if "/lib/python" not in frame[0]] or frames
    if not own:
        return "it wrote no stacks (stopped, or its machine is lost)"
    path, line, function = own[0]
    return f"{Path(path).name}:{line} in {function}"


def stack_path(folder: Path, generation: str, rank: int) -> Path:
    return folder / f"worker-{rank}-{generation[:8]}.txt"


def complete_key(generation: str) -> str:
    return f"{generation}/complete"


def member_key(generation: str, rank: int) -> str:
    return f"{generation}/here/{rank}"


def list_workers(ranks: Sequence[int]) -> str:
    return ("worker " if len(ranks) == 1 else "workers ") + ", ".join(map(str, ranks))


def within(timeout_s: float, work: Callable[[], T], otherwise: T) -> T:
    """Return the result of `work`, or `otherwise` if it raises or takes longer than `timeout_s`."""
    try:
        return run_within(timeout_s, work)
    except Exception:  # the store may be gone: then no later generation reads it
        return otherwise
