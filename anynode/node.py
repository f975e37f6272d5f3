"""What one of torchrun's agents tells other agents and sees of them (`Node`), and its wait for a round.

Again and again, a Node posts its agent's entry, reads the entries that other agents post, and pings these
agents. While an agent waits for a round, its `Meeting` says when to propose a round, and to which group.
While the agent's workers run, its `Watch` says when the round has to end. decisions.py says what a round and
a group are.

What waits for other agents or for storage is a `Task`: a generator that yields what is to be done (an
`Exchange`, an `Ask` or a `Pause`), and gets the result. `run_task` runs a task in real time, in the calling
thread; a simulator may run the tasks of many agents with a clock of its own. No public method of `Node` waits
for the network or for storage, except `end` for a limited time. So an agent whose storage hangs still obeys a
signal.
"""

import dataclasses
import math
import random
import threading
import time
import uuid
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from anynode import decisions
from anynode.boards import FORGET_S, Board, Message, Operation, request
from anynode.decisions import FINISHED, LEFT, RUNNING, WAITING, Entry, Pulse, Round
from anynode.forms import to_form

DEAD_S = 4.0  # an agent without a new post for so long is not alive
FRESH_S = 2.0  # a view that is older decides nothing
REACH_S = 4.0  # an agent is reached if it has answered a ping sent less than this ago
PROMISE_S = 10.0  # how long a promise to take part in a round holds
POLL_S = {WAITING: 0.1, RUNNING: 0.5, FINISHED: 0.1, LEFT: 0.1}  # between two posts, by the agent's state
POLL_PER_AGENT_S, MAX_POLL_S = 0.01, 1.0  # each agent reads all posts; MAX_POLL_S is less than FRESH_S
PING_S, PING_TIMEOUT_S = 0.5, 1.5
ID_LENGTH = 12  # short, because an entry lists the ids of all others twice
STRAGGLERS_S = 10.0  # the longest wait for members of a round that others have left
SAY_AFTER_S, SAY_EVERY_S = 1.0, 30.0
PROPOSAL_TIMEOUT_S = 2.0
MEET_POLL_S = 0.05
RETRY_S = (0.1, 0.3)  # wait after a failed proposal; random, because two leaders may be in each other's way
T = TypeVar("T")


@dataclass(frozen=True)
class Exchange:
    """Post `entry` on `board`. The result is the list of the valid entries there, or an OSError."""

    board: Board
    entry: Entry


@dataclass(frozen=True)
class Ask:
    """Send `message` to the servers of `agents`. The result has an answer or an OSError for each agent."""

    agents: Sequence[Entry]
    message: Message
    timeout_s: float


@dataclass(frozen=True)
class Pause:
    """Wait for `seconds`, but at most until the agent of `node`, if given, leaves the state `state`."""

    seconds: float
    node: "Node | None" = None
    state: str = ""


Task = Generator[Exchange | Ask | Pause, Any, T]


def run_task(task: Task[T]) -> T:
    """Run a task to its end, in real time; return what it returns."""
    result: Any = None
    while True:
        try:
            action = task.send(result)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        result = act(action)


def act(action: Exchange | Ask | Pause) -> Any:
    """Do what a task has yielded; return the result."""
    if isinstance(action, Pause):
        if action.node:
            action.node.wait_for_change(action)
        else:
            time.sleep(action.seconds)
        return None
    if isinstance(action, Exchange):
        try:
            return action.board.exchange(action.entry)
        except OSError as error:
            return error

    def ask(agent: Entry) -> Message | OSError:
        try:
            return request(agent.address, agent.port, action.message, action.timeout_s)
        except OSError as error:
            return error

    if len(action.agents) < 2:
        return [ask(agent) for agent in action.agents]
    with ThreadPoolExecutor(len(action.agents)) as threads:
        return list(threads.map(ask, action.agents))


def spawn_thread(task: Task[None]) -> None:
    threading.Thread(target=run_task, args=(task,), daemon=True).start()


@dataclass(frozen=True)
class View:
    """What an agent sees of the other agents at one moment.

    If no board (a place where agents post entries) has answered lately, `is_fresh` is false, and `alive` has
    only `me`. Such a view must not be used for decisions on rounds.
    """

    me: Entry
    alive: tuple[Entry, ...]  # `me`, and agents that wait or run
    gone: frozenset[str]  # ids of agents that have ended, or are silent on boards and network
    ended: frozenset[str]  # ids of agents that have ended, but have not posted FINISHED
    finished: bool  # an agent of this job, or an agent seen running, has posted FINISHED
    is_fresh: bool
    troubles: tuple[str, ...]  # boards and agents that do not answer, or why they cannot be used


@dataclass
class Peer:
    """Another agent, as this agent sees it."""

    entry: Entry
    # One for each board, by its name, because entries of different ages on two boards are no sign of life.
    pulses: dict[str, Pulse] = field(default_factory=dict)
    answered_at: float = -math.inf  # when the last ping that the other agent answered was sent
    has_ended: bool = False  # its port refuses connections, or is another agent's


class Node:
    """One agent: the entry that it posts, what it sees of other agents, and the round that it agreed to.

    `clock` returns the time in seconds, and `spawn` starts a task that runs beside all others.
    """

    def __init__(
        self,
        host: str,
        address: str,
        nproc: int,
        clock: Callable[[], float] = time.monotonic,
        spawn: Callable[[Task[None]], None] = spawn_thread,
    ) -> None:
        self.clock, self._spawn = clock, spawn
        self._changed = threading.Condition()  # guards all fields below, and wakes the posting threads
        self.id = uuid.uuid4().hex[:ID_LENGTH]
        self._entry = Entry(id=self.id, host=host, address=address, port=0, nproc=nproc)
        self._peers: dict[str, Peer] = {}  # by id
        self._read_at: dict[str, float] = {}  # when each board was last read, by the board's name
        self._trouble: dict[str, str] = {}  # why each board cannot be used, by its name; "": it can
        self._seen_running: set[str] = set()  # ids of agents
        self._promise: tuple[str, str, float] = ("", "", 0.0)  # leader's id, round's id, when it expires
        self.entered: Round | None = None  # the round that this agent entered since `wait_for_round`
        self._posted: dict[str, str] = {}  # the state that was last posted, by a board's name

    def operations(self) -> dict[str, Operation]:
        return {"ping": self._on_ping, "propose": self._on_propose, "go": self._on_go}

    def start(self, port: int, boards: Sequence[Board]) -> None:
        """Begin to post this agent's entry on `boards`, to read other entries, and to ping other agents.

        Other agents reach this agent's server on `port`.
        """
        self._entry = dataclasses.replace(self._entry, port=port)
        self._boards = boards
        for board in boards:
            self._spawn(self._follow(board))

    def _follow(self, board: Board) -> Task[None]:
        while True:
            with self._changed:
                reach = self._reach(self.clock())
                mine = dataclasses.replace(self._entry, counter=self._entry.counter + 1, reach=reach)
                self._entry = mine
            found = yield Exchange(board, mine)
            count = 0
            with self._changed:
                if isinstance(found, OSError):  # the loop asks again
                    self._trouble[board.name] = f"{board.name}: {found.strerror or found}"
                else:
                    self._trouble[board.name] = ""
                    self._posted[board.name] = mine.state
                    self._take_in(board.name, found)
                    count = len(found)
            yield Pause(max(POLL_S[mine.state], min(MAX_POLL_S, POLL_PER_AGENT_S * count)), self, mine.state)

    def wait_for_change(self, pause: Pause) -> None:
        with self._changed:
            if self._entry.state == pause.state:
                self._changed.wait(pause.seconds)

    def _reach(self, now: float) -> tuple[str, ...]:
        return tuple(sorted(id for id, peer in self._peers.items() if now - peer.answered_at < REACH_S))

    def _take_in(self, board: str, entries: Sequence[Entry]) -> None:
        now = self._read_at[board] = self.clock()
        for entry in entries:
            if entry.id == self.id:
                continue
            peer = self._peers.get(entry.id)
            if peer is None:
                peer = self._peers[entry.id] = Peer(entry)
                self._spawn(self._ping(peer))
            if entry.counter > peer.entry.counter:
                peer.entry = entry
            pulse = peer.pulses.setdefault(board, Pulse(entry.counter, now))
            pulse.observe(entry.counter, now)
            if entry.state == RUNNING and pulse.is_alive(now, DEAD_S):
                self._seen_running.add(entry.id)
        self._peers = {
            id: peer
            for id, peer in self._peers.items()
            if any(now - pulse.since <= FORGET_S for pulse in peer.pulses.values())
        }

    def _ping(self, peer: Peer) -> Task[None]:
        """Ping the agent `peer` again and again, and note whether it answers, until `peer` is forgotten."""
        while self._peers.get(peer.entry.id) is peer:
            began = self.clock()
            (answer,) = yield Ask([peer.entry], {"op": "ping"}, PING_TIMEOUT_S)
            with self._changed:
                peer.has_ended = isinstance(answer, ConnectionRefusedError)
                if not isinstance(answer, OSError):
                    peer.has_ended = answer.get("id") != peer.entry.id
                    peer.answered_at = began
                if peer.has_ended:
                    peer.answered_at = -math.inf
            yield Pause(PING_S)  # without an answer the agent is out of reach after REACH_S

    def view(self) -> View:
        with self._changed:
            now = self.clock()
            fresh = {name: at for name, at in self._read_at.items() if now - at < FRESH_S}
            reach = self._reach(now)
            if reach != self._entry.reach:
                self._entry = dataclasses.replace(self._entry, reach=reach)
            me = self._entry
            alive, gone, ended, troubles = [me], set(), set(), set()
            for id, peer in self._peers.items():
                entry, pulses = peer.entry, peer.pulses
                is_alive = any(
                    name in pulses and pulses[name].is_alive(at, DEAD_S) for name, at in fresh.items()
                )
                was_alive = any(pulse.has_changed for pulse in pulses.values())
                # An agent that answers pings is not gone, even if it posts nothing: its storage may hang.
                # Without a fresh board no agent counts as lost.
                is_lost = bool(fresh) and was_alive and not is_alive and id not in me.reach
                if entry.state == LEFT or (peer.has_ended and entry.state != FINISHED):
                    ended.add(id)
                if peer.has_ended or is_lost or (is_alive and entry.state in (FINISHED, LEFT)):
                    gone.add(id)
                elif is_alive:
                    alive.append(entry)
                    if id not in me.reach:
                        troubles.add(f"{entry.address}:{entry.port} does not answer")
            ended |= {*me.members} - {me.id, *self._peers}  # forgotten while this agent was frozen
            troubles |= {
                self._trouble.get(board.name) or f"{board.name} does not answer"
                for board in self._boards
                if board.name not in fresh
            }
            return View(
                me=me,
                alive=tuple(alive),
                gone=frozenset(gone),
                ended=frozenset(ended),
                # The agent that posted FINISHED may be gone by now, if this agent was frozen or cut off.
                finished=any(
                    peer.entry.state == FINISHED
                    and (id in self._seen_running or peer.entry.job == me.job != "")
                    for id, peer in self._peers.items()
                ),
                is_fresh=bool(fresh),
                troubles=tuple(sorted(troubles)),
            )

    def wait_for_round(self) -> None:
        """Post the state WAITING, and clear `entered` and this agent's promise. Returns at once."""
        with self._changed:
            self.entered, self._promise = None, ("", "", 0.0)
            self._set_state(WAITING)

    def end(self, state: str, within_s: float) -> None:
        """Post `state`: FINISHED if the job is finished, LEFT if this agent leaves the job.

        Waits until a board has the state, at most `within_s` seconds.
        """
        with self._changed:
            self._set_state(state)
        deadline = time.monotonic() + within_s
        while state not in self._posted.values() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _set_state(self, state: str) -> None:
        self._entry = dataclasses.replace(self._entry, state=state)
        self._changed.notify_all()

    def _on_ping(self, message: Message) -> Message:
        return {"id": self.id}

    def _on_propose(self, message: Message) -> Message:
        return {"ok": self.promise(to_form(Round, message["round"]))}

    def promise(self, round: Round) -> bool:
        """Promise the leader of `round` to take part in the round, and return True.

        The promise expires after PROMISE_S seconds. Returns False, and promises nothing, if this agent is not
        waiting for a round, or if a promise to a different leader still holds.
        """
        leader = round.members[0].id
        with self._changed:
            promised_to, _, until = self._promise
            is_free = promised_to in ("", leader) or self.clock() > until
            if self._entry.state != WAITING or self.entered is not None or not is_free:
                return False
            self._promise = (leader, round.id, self.clock() + PROMISE_S)
            return True

    def release(self, round: Round) -> None:
        """Take back this agent's promise to take part in `round`, whose leader this agent is."""
        with self._changed:
            if self._promise[1] == round.id:
                self._promise = ("", "", 0.0)

    def _on_go(self, message: Message) -> Message:
        return {"ok": self.enter(to_form(Round, message["round"]))}

    def enter(self, round: Round) -> bool:
        """Enter `round`: set `entered`, post the state RUNNING, and return True.

        Returns False if this agent is not waiting for a round. Also returns False if this agent has not
        promised to take part in `round`, or if the promise has expired.
        """
        with self._changed:
            _, promised, until = self._promise
            if self._entry.state != WAITING or promised != round.id or self.clock() > until:
                return False
            members = tuple(member.id for member in round.members)
            self._entry = dataclasses.replace(
                self._entry, round=round.id, number=round.number, members=members, job=round.job
            )
            self.entered, self._promise = round, ("", "", 0.0)
            self._set_state(RUNNING)
            return True


@dataclass
class Meeting:
    """One agent's wait for a round. Times are in seconds, by a monotonic clock."""

    min_nodes: int
    max_nodes: int
    began: float
    _group: tuple[str, ...] = ()
    _unchanged_since: float = 0.0
    _leaving_since: float | None = None
    _said: str = ""
    _said_at: float = 0.0

    def group_to_propose(self, view: View, now: float) -> list[Entry] | None:
        """Return the group to which this agent should propose a round now, in the order of ranks, else None.

        The agent should propose a round if `view` is fresh, the agent leads the group, the group is complete,
        and no round goes on. If some members have left a round, the agent first waits up to STRAGGLERS_S
        seconds for the other members to leave. Call this with each new view: the Meeting measures how long
        the group stays the same.
        """
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
        unchanged_s = now - self._unchanged_since
        is_complete = decisions.is_complete(group, self.min_nodes, self.max_nodes, unchanged_s, view.gone)
        return group if is_complete else None

    def line_to_say(self, view: View, now: float) -> str | None:
        """Return a line that says what this agent waits for; None if the line need not be logged now.

        No line is due in the first SAY_AFTER_S seconds of this Meeting. Then a line is due if it differs from
        the last one that was returned, or SAY_EVERY_S seconds after that.
        """
        if now - self.began < SAY_AFTER_S:
            return None
        line = f"no place to meet can be used; {'; '.join(view.troubles)}"
        if view.is_fresh:
            line = decisions.describe_wait(view.me, view.alive, self.min_nodes, view.troubles)
        if line == self._said and now - self._said_at < SAY_EVERY_S:
            return None
        self._said, self._said_at = line, now
        return line

    def meet(
        self, node: Node, host_stores: Callable[[], tuple[int, int]], say: Callable[[str], None]
    ) -> Task[Round | None]:
        """Wait until a round with the agent of `node` starts, and return it; None if the job is finished.

        If the agent leads, it proposes the round. `host_stores` starts the TCPStores of a round that this
        agent leads, and returns their ports: the round's, and the job's. `say` logs a line.
        """
        said = ""
        while node.entered is None:
            view, now = node.view(), node.clock()
            if view.finished:
                return None
            group = self.group_to_propose(view, now)
            if group is None:
                line = self.line_to_say(view, now)
                if line is not None:
                    say(line)
                yield Pause(MEET_POLL_S)
                continue
            failure = yield from propose(node, group, host_stores())
            if failure:
                if failure != said:
                    said = failure
                    say(f"{failure}; retrying")
                yield Pause(random.uniform(*RETRY_S))
        return node.entered


def propose(node: Node, group: Sequence[Entry], ports: tuple[int, int]) -> Task[str]:
    """Propose a round to `group`, whose leader is the agent of `node`; start it if all accept in time.

    `ports` are those of the round's TCPStore and of the job's. Returns "" if the leader has entered the
    round, else a text that says why not.
    """
    number, job = decisions.job_of(group)
    others = group[1:]
    round = Round(
        id=uuid.uuid4().hex,
        number=number + 1,
        job=job or uuid.uuid4().hex,
        members=tuple(dataclasses.replace(one, members=(), reach=()) for one in group),  # not the long lists
        store_port=ports[0],
        job_store_port=ports[1],
    )
    has_promised = node.promise(round)
    if not has_promised:
        return "this agent has accepted another proposal"
    answers = yield Ask(others, {"op": "propose", "round": asdict(round)}, PROPOSAL_TIMEOUT_S)
    refusals = [str(one) for one, answer in zip(others, answers, strict=True) if not is_yes(answer)]
    if refusals:
        node.release(round)
        return f"{', '.join(refusals)} did not accept the round"
    has_entered = node.enter(round)
    if not has_entered:
        return "the answers to a proposal took too long"
    yield Ask(others, {"op": "go", "round": asdict(round)}, PROPOSAL_TIMEOUT_S)
    return ""  # an agent that has not heard "go" still waits, which the others see


def is_yes(answer: Message | OSError) -> bool:
    return not isinstance(answer, OSError) and answer.get("ok") is True


@dataclass
class Watch:
    """Measures, in seconds, for how long an agent whose workers run has seen a reason to end the round."""

    max_nodes: int
    _restart: decisions.Restart | None = None
    _since: float = 0.0

    def reason_to_end(self, view: View, now: float) -> str:
        """Return why the round has to end now; "" if there is no reason that has lasted long enough."""
        restart = None
        if view.is_fresh:
            restart = decisions.must_restart(view.me, view.alive, self.max_nodes, view.ended)
        if restart != self._restart:
            self._restart, self._since = restart, now
        return restart.reason if restart and now - self._since >= restart.hold_s else ""
