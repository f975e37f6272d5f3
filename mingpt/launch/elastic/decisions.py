"""Decide which of torchrun's agents start workers together, and which have to restart theirs.

A group is the agents that may start workers together; a round is their agreement to do so, and the workers
that follow until the next restart. Decisions are made from the entries that agents post, without clock,
network or torch.
"""

import ipaddress
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import pydantic
from pydantic import StrictInt

WAITING, RUNNING, FINISHED, LEFT = "waiting", "running", "finished", "left"
FIRST_CALL_S, LAST_CALL_S = 5.0, 1.5  # how long the first round, and later ones, wait for other agents
JOIN_HOLD_S = 1.0  # a round ends for a waiting node, or a larger group, once that has been seen for so long
LAG_HOLD_S = 4.0  # a member of a new round may briefly be seen in its old round


@dataclass(frozen=True)
class Entry:
    """The facts that an agent posts about itself. `counter` grows with each post, as a heartbeat."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")
    id: str
    host: str
    address: str
    port: StrictInt  # of the agent's server
    counter: StrictInt = 0
    state: str = WAITING
    round: str = ""  # id of the round that the agent is in, or was in last
    number: StrictInt = 0  # of that round in the job
    members: tuple[str, ...] = ()  # ids of that round's members
    reach: tuple[str, ...] = ()  # ids of the agents that have answered this one lately
    job: str = ""  # the job's random token, from its first round on
    nproc: StrictInt = 0  # workers on this node; 0: not known

    @property
    def key(self) -> tuple[int, int, str, str]:
        """The key that sorts agents by rank: the address, as a number if it is an IP address, then the id."""
        try:
            return (0, int(ipaddress.ip_address(self.address)), "", self.id)
        except ValueError:
            return (1, 0, self.address, self.id)

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@dataclass(frozen=True)
class Round:
    """An agreement of agents to start workers together, as its leader proposes it.

    `members` are in the order of their ranks; the first one is the leader.
    """

    id: str
    number: StrictInt  # in the job, from 1
    job: str
    members: tuple[Entry, ...]
    store_port: StrictInt  # of the workers' store, on the leader's node


@dataclass
class Pulse:
    """One agent's heartbeat on one board: the agent is alive if the counter in its entry changed lately.

    Times are in seconds by the reader's clock. The first counter that is seen is not a change, so an entry
    that an earlier job left in a folder never counts as alive.
    """

    counter: int
    since: float  # when the counter changed, or was first seen
    has_changed: bool = False

    def observe(self, counter: int, now: float) -> None:
        if counter > self.counter:
            self.counter, self.since, self.has_changed = counter, now, True

    def is_alive(self, now: float, dead_s: float) -> bool:
        return self.has_changed and now - self.since < dead_s


def is_linked(one: Entry, other: Entry) -> bool:
    """Return whether each of two agents has reached the other lately, or they are the same."""
    return one.id == other.id or (other.id in one.reach and one.id in other.reach)


def best_group(entries: Iterable[Entry], max_nodes: int) -> list[Entry]:
    """Return agents that all reach each other, at most `max_nodes`, in the order of their ranks.

    Until all reach each other, the agent that reaches the fewest is left out; of several such agents, the one
    with the largest `key`. If more than `max_nodes` remain, members of the latest round are taken first.
    """
    group = sorted(entries, key=lambda entry: entry.key)
    reach = {entry.id: {entry.id, *entry.reach} for entry in group}
    links = {
        id: {other for other in reach if other in reached and id in reach[other]}
        for id, reached in reach.items()
    }
    while any(len(linked) < len(group) for linked in links.values()):
        worst = min(reversed(group), key=lambda entry: len(links[entry.id]))
        group.remove(worst)
        for id in links.pop(worst.id) - {worst.id}:
            links[id].remove(worst.id)
    if len(group) > max_nodes:
        former = last_members(group)
        group = sorted(group, key=lambda entry: (entry.id not in former, entry.key))[:max_nodes]
    return sorted(group, key=lambda entry: entry.key)


def last_members(group: Sequence[Entry]) -> set[str]:
    """Return the ids of the members of the latest rendezvous round that any agent of `group` was in."""
    number = max((entry.number for entry in group), default=0)
    return {id for entry in group if entry.number == number for id in entry.members}


def job_of(group: Sequence[Entry]) -> tuple[int, str]:
    """Return (number of the latest round, token of the job) as `group` knows them; (0, "") in a new job."""
    return max((entry.number, entry.job) for entry in group)


def active_rounds(alive: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return {id of a rendezvous round: its members whose workers run}."""
    found: dict[str, list[Entry]] = {}
    for entry in alive:
        if entry.state == RUNNING:
            found.setdefault(entry.round, []).append(entry)
    return found


def busy(alive: Collection[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return the running agents of rendezvous rounds that go on, and of rounds that a member has left.

    While a round goes on, no other round starts; it ends by itself if it can take in a waiting agent. If a
    member has left a round and waits for a new one, the others will soon do so, too, and are given time.
    """
    left = {entry.round for entry in alive if entry.state == WAITING and entry.round}
    going_on: list[Entry] = []
    leaving: list[Entry] = []
    for name, members in active_rounds(alive).items():
        (leaving if name in left else going_on).extend(members)
    return going_on, leaving


def is_complete(
    group: Sequence[Entry], min_nodes: int, max_nodes: int, unchanged_s: float, gone: Collection[str]
) -> bool:
    """Return whether the group may start: it is full, or has `min_nodes` and has waited enough for others.

    After the job's first round, it does not wait if each member of the last round is in the group or `gone`,
    the ids of agents that ended or are silent. The group has been the same for `unchanged_s` seconds.
    """
    if len(group) < min_nodes:
        return False
    if len(group) == max_nodes:
        return True
    number, _ = job_of(group)
    if number == 0:
        return unchanged_s >= FIRST_CALL_S
    here = {entry.id for entry in group}
    return unchanged_s >= LAST_CALL_S or last_members(group) <= here | set(gone)


@dataclass(frozen=True)
class Restart:
    """Why an agent must restart its workers in a new round, if the reason lasts for `hold_s` seconds."""

    reason: str
    hold_s: float = 0.0


def must_restart(me: Entry, alive: Collection[Entry], max_nodes: int) -> Restart | None:
    """Return a Restart if the round of agent `me` has to end for a reason that its workers cannot see.

    The reasons: a member is in another round, or in none; an agent waits that all running members reach, and
    the round has fewer than `max_nodes`; another round has more running members, or as many and a smaller id.
    Returns None otherwise, also if a waiting agent is reached by only some members.
    """
    mates = [entry for entry in alive if entry.id in me.members and entry.id != me.id]
    for mate in mates:
        is_here = mate.state == RUNNING and mate.round == me.round
        if mate.state in (WAITING, RUNNING) and not is_here:
            has_left = mate.round == me.round or mate.number > me.number
            return Restart(f"{mate} is not in the round", 0.0 if has_left else LAG_HOLD_S)
    running = [me, *(mate for mate in mates if mate.state == RUNNING)]
    if len(me.members) < max_nodes:
        for entry in sorted(alive, key=lambda entry: entry.key):
            can_join = entry.state == WAITING and entry.id not in me.members
            if can_join and all(is_linked(entry, member) for member in running):
                return Restart(f"{entry} joins", JOIN_HOLD_S)
    mine = (-len(running), me.round)
    for name, members in active_rounds(alive).items():
        if name != me.round and (-len(members), name) < mine:
            return Restart(f"{list_nodes(members)} go on as a larger group", JOIN_HOLD_S)
    return None


def list_nodes(entries: Iterable[Entry]) -> str:
    return ", ".join(str(entry) for entry in sorted(entries, key=lambda entry: entry.key))


def describe_wait(me: Entry, alive: Collection[Entry], min_nodes: int, troubles: Sequence[str]) -> str:
    """Return a log line: what this node waits for, which others wait, and which places do not answer."""
    linked = [entry for entry in alive if entry.state == WAITING and is_linked(me, entry)]
    going_on, leaving = busy(alive)
    if going_on:
        text = f"waiting to join {list_nodes(going_on)}"
    elif leaving:
        text = f"waiting for {list_nodes(leaving)} to end the round"
    else:
        text = f"waiting for more nodes, at least {min_nodes} in all"
    return "; ".join([f"{text}: here {list_nodes(linked)}", *troubles])
