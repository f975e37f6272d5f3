"""One agent among others: it posts what it is, reads what the others are, and pings them, in the background.

No method of `Node` waits for the network or for storage, so an agent whose storage hangs still obeys a
signal. `Meeting` makes, of what an agent sees while it waits, the group that it proposes if it is the one to
lead it.
"""

import dataclasses
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mingpt.base.system import try_within
from mingpt.launch.elastic import decisions
from mingpt.launch.elastic.boards import FORGET_S, Board, Message, request
from mingpt.launch.elastic.decisions import FINISHED, LEFT, RUNNING, WAITING, Entry, Liveness

DEAD_S = 4.0  # without a new post
FRESH_S = 2.0  # a view that is older decides nothing
REACH_S = 4.0  # since the last ping that was answered
PROMISE_S = 10.0
POLL_S = {WAITING: 0.1, RUNNING: 0.5, FINISHED: 0.1, LEFT: 0.1}
POLL_PER_AGENT_S, MAX_POLL_S = 0.01, 1.0  # each agent reads what each one posts; less than FRESH_S
PING_S, PING_TIMEOUT_S = 0.5, 1.5
ID_LENGTH = 12  # an entry lists all others twice
FIRST_CALL_S, LAST_CALL_S = 5.0, 1.5
STRAGGLERS_S = 10.0  # for members of a round that others have left
SAY_AFTER_S, SAY_EVERY_S = 1.0, 30.0


@dataclass(frozen=True)
class View:
    """What this agent sees at a moment; `is_fresh` is false if no board has answered lately."""

    me: Entry
    alive: tuple[Entry, ...]  # me included
    gone: frozenset[str]  # ids of agents that have ended, or are silent on boards and network
    finished: bool  # an agent of this job, or one that was seen running, has finished it; no earlier job
    is_fresh: bool
    troubles: tuple[str, ...]  # what does not answer, or why it cannot be used


class Node:
    """This agent's entry, its view of the others, and its side of the agreement on a round."""

    def __init__(self, host: str, address: str, nproc: int) -> None:
        self._lock = threading.Lock()
        self._entry = Entry(id=uuid.uuid4().hex[:ID_LENGTH], host=host, address=address, port=0, nproc=nproc)
        self._entries: dict[str, Entry] = {}
        # By a board's name: two boards may hold an entry at different ages, which is no sign of life.
        self._liveness: dict[str, Liveness] = {}
        self._read_at: dict[str, float] = {}  # by a board's name, as are these
        self._trouble: dict[str, str] = {}
        self._answered: dict[str, float] = {}  # by an agent's id
        self._gone: set[str] = set()
        self._seen_running: set[str] = set()
        self._pinging: set[str] = set()
        self._changed = threading.Condition(self._lock)
        self._promise: tuple[str, str, float] = ("", "", 0.0)  # leader, round, until when
        self._round: dict[str, Any] | None = None
        self._posted: dict[str, str] = {}  # the state that a board has seen

    def operations(self) -> dict[str, Any]:
        return {"ping": self._on_ping, "propose": self._on_propose, "go": self._on_go}

    def start(self, port: int, boards: Sequence[Board]) -> None:
        """Begin to post and to ping; the server listens on `port`."""
        self._entry = dataclasses.replace(self._entry, port=port)
        self._boards = boards
        for board in boards:
            threading.Thread(target=self._follow, args=(board,), daemon=True).start()

    @property
    def id(self) -> str:
        return self._entry.id

    def _follow(self, board: Board) -> None:
        while True:
            with self._lock:
                mine = self._next_entry()
            try:
                entries = board.exchange(mine)
                trouble = ""
            except OSError as error:  # it is asked again
                entries, trouble = [], describe_trouble(board.name, error)
            with self._changed:
                self._trouble[board.name] = trouble
                if not trouble:
                    self._posted[board.name] = mine.state
                    self._take_in(board, entries)
                if self._entry.state == mine.state:
                    self._changed.wait(
                        max(POLL_S[mine.state], min(MAX_POLL_S, POLL_PER_AGENT_S * len(entries)))
                    )

    def _next_entry(self) -> Entry:
        reach = self._reach(time.monotonic())
        self._entry = dataclasses.replace(self._entry, counter=self._entry.counter + 1, reach=reach)
        return self._entry

    def _reach(self, now: float) -> tuple[str, ...]:
        return tuple(sorted(id for id, at in self._answered.items() if now - at < REACH_S))

    def _take_in(self, board: Board, entries: Sequence[Entry]) -> None:
        now = time.monotonic()
        self._read_at[board.name] = now
        liveness = self._liveness.setdefault(board.name, Liveness(DEAD_S))
        liveness.observe(entries, now)
        for entry in entries:
            known = self._entries.get(entry.id)
            if entry.id != self.id and (known is None or entry.counter > known.counter):
                self._entries[entry.id] = entry
            if entry.state == RUNNING and liveness.is_alive(entry.id, now):
                self._seen_running.add(entry.id)
        for id, entry in list(self._entries.items()):
            if all(liveness.silent_for(id, now) > FORGET_S for liveness in self._liveness.values()):
                del self._entries[id]
                self._gone.discard(id)
                self._answered.pop(id, None)
            elif id not in self._pinging:
                self._pinging.add(id)
                threading.Thread(target=self._ping, args=(entry,), daemon=True).start()
        liveness.keep(self._entries.keys() | {entry.id for entry in entries})

    def _ping(self, entry: Entry) -> None:
        """Note whether an agent answers, until it is forgotten."""
        while True:
            is_gone, started = False, time.monotonic()
            try:
                answer = request(entry.address, entry.port, {"op": "ping"}, PING_TIMEOUT_S)
                is_gone = answer.get("id") != entry.id
            except ConnectionRefusedError:
                is_gone = True
            except OSError:
                pass  # silent: it is out of reach once REACH_S are over
            else:
                if not is_gone:
                    with self._lock:
                        self._answered[entry.id] = started
            with self._lock:
                (self._gone.add if is_gone else self._gone.discard)(entry.id)
                if is_gone:
                    self._answered.pop(entry.id, None)
                if entry.id not in self._entries:
                    self._pinging.discard(entry.id)
                    return
            time.sleep(PING_S)

    def view(self) -> View:
        with self._lock:
            now = time.monotonic()
            fresh = {name: at for name, at in self._read_at.items() if now - at < FRESH_S}
            alive = [
                entry
                for entry in self._entries.values()
                if any(self._liveness[name].is_alive(entry.id, at) for name, at in fresh.items())
            ]
            ended = {entry.id for entry in alive if entry.state in (FINISHED, LEFT)}
            reach = self._reach(now)
            known = [
                id for id in self._entries if any(live.was_alive(id) for live in self._liveness.values())
            ]
            # Whoever still answers is not gone: its storage may hang. And who sees no board knows nothing.
            lapsed = set(known) - {entry.id for entry in alive} - set(reach) if fresh else set()
            troubles = [
                f"{entry.address}:{entry.port} does not answer"
                for entry in alive
                if entry.id not in ended | self._gone | set(reach)
            ]
            troubles += [
                self._trouble.get(board.name) or f"{board.name} does not answer"
                for board in self._boards
                if board.name not in fresh
            ]
            me = dataclasses.replace(self._entry, reach=reach)
            return View(
                me=me,
                alive=(me, *(entry for entry in alive if entry.id not in ended | self._gone)),
                gone=frozenset(self._gone | ended | lapsed),
                finished=any(self._is_end_of_job(entry) for entry in self._entries.values()),
                is_fresh=bool(fresh),
                troubles=tuple(sorted(set(troubles))),
            )

    def _is_end_of_job(self, entry: Entry) -> bool:
        """Its agent may be gone since, while this one was frozen or cut off."""
        is_own = entry.id in self._seen_running or (entry.job == self._entry.job != "")
        return entry.state == FINISHED and is_own

    def wait_for_round(self) -> None:
        """Post that this agent waits."""
        with self._changed:
            self._round, self._promise = None, ("", "", 0.0)
            self._set_state(WAITING)

    def end(self, state: str, within_s: float) -> None:
        """Post that the job is FINISHED, or that this agent LEFT; waits for a board, at most `within_s`."""
        with self._changed:
            self._set_state(state)
        deadline = time.monotonic() + within_s
        while state not in self._posted.values() and time.monotonic() < deadline:
            time.sleep(0.02)

    def remove(self, within_s: float) -> None:
        """Take this agent's entry from the boards; gives up after `within_s`."""

        def work() -> None:
            for board in self._boards:
                try:
                    board.remove(self._entry)
                except OSError:
                    continue  # it is seen as dead in DEAD_S

        try_within(within_s, work)

    def _set_state(self, state: str) -> None:
        self._entry = dataclasses.replace(self._entry, state=state)
        self._changed.notify_all()

    def entered_round(self) -> dict[str, Any] | None:
        """The round that this agent has been taken into since `wait_for_round`, if any."""
        with self._lock:
            return self._round

    def _on_ping(self, message: Message) -> Message:
        return {"id": self._entry.id, "host": self._entry.host, "state": self._entry.state}

    def _on_propose(self, message: Message) -> Message:
        return {"ok": self.promise(message["round"])}

    def promise(self, round: dict[str, Any]) -> bool:
        """Whether this agent waits, and has promised itself to no other leader."""
        leader = round["members"][0]["id"]
        with self._lock:
            promised_to, _, until = self._promise
            is_free = promised_to in ("", leader) or time.monotonic() > until
            if self._entry.state != WAITING or self._round is not None or not is_free:
                return False
            self._promise = (leader, round["id"], time.monotonic() + PROMISE_S)
            return True

    def release(self, round: str) -> None:
        """Take back the promise to the leader of this round, which is this agent itself."""
        with self._lock:
            if self._promise[1] == round:
                self._promise = ("", "", 0.0)

    def _on_go(self, message: Message) -> Message:
        return {"ok": self.enter(message["round"])}

    def enter(self, round: dict[str, Any]) -> bool:
        """Take part in a round, if this agent has promised to and it is not too late."""
        with self._changed:
            _, promised, until = self._promise
            if self._entry.state != WAITING or promised != round["id"] or time.monotonic() > until:
                return False
            self._entry = dataclasses.replace(
                self._entry,
                round=round["id"],
                number=round["number"],
                members=tuple(member["id"] for member in round["members"]),
                job=round["job"],
            )
            self._round, self._promise = round, ("", "", 0.0)
            self._set_state(RUNNING)
            return True


def describe_trouble(name: str, error: OSError) -> str:
    if isinstance(error, (TimeoutError, ConnectionError)):
        return f"{name} does not answer"
    return f"{name}: {error.strerror or error}"


@dataclass
class Meeting:
    """One wait of one agent. Times are those of a monotonic clock, in seconds."""

    min_nodes: int
    max_nodes: int
    began: float
    _group: tuple[str, ...] = ()
    _unchanged_since: float = 0.0
    _leaving_since: float | None = None
    _said: str = ""
    _said_at: float = 0.0

    def group_to_propose(self, view: View, now: float) -> list[Entry] | None:
        """The group in the order of its ranks, if it is complete and this agent leads it."""
        if not view.is_fresh:
            self._group = ()
            return None
        going_on, leaving = decisions.busy(view.alive)
        if not leaving:
            self._leaving_since = None
        elif self._leaving_since is None:
            self._leaving_since = now
        waiting = [entry for entry in view.alive if entry.state == WAITING]
        group = decisions.best_group(waiting, self.max_nodes)
        ids = tuple(entry.id for entry in group)
        if ids != self._group:
            self._group, self._unchanged_since = ids, now
        is_awaited = self._leaving_since is not None and now - self._leaving_since < STRAGGLERS_S
        if going_on or is_awaited or group[0].id != view.me.id:
            return None
        is_complete = decisions.is_complete(
            group,
            self.min_nodes,
            self.max_nodes,
            unchanged_s=now - self._unchanged_since,
            gone=view.gone,
            first_call_s=FIRST_CALL_S,
            last_call_s=LAST_CALL_S,
        )
        return group if is_complete else None

    def line_to_say(self, view: View, now: float) -> str | None:
        """What a person should know: once when it changes, and again every SAY_EVERY_S."""
        if now - self.began < SAY_AFTER_S:
            return None
        line = decisions.describe_wait(view.me, view.alive, self.min_nodes, view.troubles)
        if line == self._said and now - self._said_at < SAY_EVERY_S:
            return None
        self._said, self._said_at = line, now
        return line
