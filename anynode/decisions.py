"""Decide which of torchrun's agents start workers together, and which agents have to restart their workers.

A group is a set of agents that may start workers together. A round begins when the agents of a group agree to
start workers, and lasts until the next restart. All functions decide from their arguments, such as the
entries that agents post, without clock, network or torch.
"""

import functools
import ipaddress
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

WAITING, RUNNING, FINISHED, LEFT = "waiting", "running", "finished", "left"
FIRST_CALL_S, LAST_CALL_S = 5.0, 1.5  # how long the first round, and later ones, wait for other agents
JOIN_HOLD_S = 1.0  # for how long a waiting node, or a larger group, must be seen before a round ends for it
# For how long a member must be seen in an older round before the present round ends: a member may be seen in
# the older round briefly after it has left that round.
LAG_HOLD_S = 4.0
ENDED_HOLD_S = 3.0  # for how long an agent must have ended before its round ends, if other workers go on


@dataclass(frozen=True)
class Entry:
    """What an agent posts about itself. `counter` grows with each post, as a heartbeat."""

    id: str
    host: str
    address: str
    port: int  # of the agent's server
    counter: int = 0
    state: str = WAITING  # or RUNNING, FINISHED, LEFT
    round: str = ""  # id of the round that the agent is in, or was in last; "": none so far
    number: int = 0  # of that round in the job, from 1
    members: tuple[str, ...] = ()  # ids of that round's members
    reach: tuple[str, ...] = ()  # ids of the agents that have answered this agent's pings lately
    job: str = ""  # the job's random token; "" before the first round
    nproc: int = 0  # workers on this node; 0: not known

    @property
    def key(self) -> tuple[int, int, str, str]:
        """The key that sorts agents by rank: (0, IP address as number, "", id), or (1, 0, host name, id)."""
        return (*address_key(self.address), self.id)

    def __str__(self) -> str:
        return f"{self.host} ({self.address})"


@functools.cache
def address_key(address: str) -> tuple[int, int, str]:
    try:
        return 0, int(ipaddress.ip_address(address)), ""
    except ValueError:
        return 1, 0, address


@dataclass(frozen=True)
class Round:
    """An agreement of agents to start workers together, as the leader proposes it.

    `members` are in the order of their ranks; the first member is the leader.
    """

    id: str
    number: int  # in the job, from 1
    job: str  # the job's random token
    members: tuple[Entry, ...]
    store_port: int  # of this round's TCPStore, on the leader's node
    job_store_port: int  # of the TCPStore there that lives as long as the leader's agent


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
    """Return whether each of two agents has reached the other lately, or both are the same agent."""
    return one.id == other.id or (other.id in one.reach and one.id in other.reach)


def best_group(entries: Iterable[Entry], max_nodes: int) -> list[Entry]:
    """Return the entries of at most `max_nodes` agents that all reach each other, in the order of ranks.

    While some agents do not reach each other, the agent that is linked (see `is_linked`) with the fewest
    others is left out. In a tie, the agent with the largest `key` is left out. If more than `max_nodes`
    agents remain, the agents of the latest round (see `last_members`) are preferred.
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
    """Return the ids of members of the round with the largest number in `group`, or of all such rounds."""
    number = max((entry.number for entry in group), default=0)
    return {id for entry in group if entry.number == number for id in entry.members}


def job_of(group: Sequence[Entry]) -> tuple[int, str]:
    """Return (number of the latest round, token of the job), as `group` knows them; (0, "") for a new job."""
    return max((entry.number, entry.job) for entry in group)


def active_rounds(alive: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Return {id of a round: the agents in `alive` whose workers run in this round}."""
    found: dict[str, list[Entry]] = {}
    for entry in alive:
        if entry.state == RUNNING:
            found.setdefault(entry.round, []).append(entry)
    return found


def busy(alive: Collection[Entry]) -> tuple[list[Entry], list[Entry]]:
    """Return (running agents of rounds that go on, running agents of rounds that a member has left).

    A member has left its round if the member waits for a new round. A round goes on if no agent in `alive`
    has left it.
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
    """Return whether the group may start a round.

    A group may start if it has `max_nodes` agents, or if it has at least `min_nodes` agents and has waited
    long enough for others. The group has been the same for `unchanged_s` seconds. `gone` has the ids of
    agents that have ended or are silent. After the job's first round, the group need not wait if each member
    of the last round is in the group or gone.
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
    """Why an agent must restart its workers in a new round, once the reason has lasted `hold_s` seconds."""

    reason: str
    hold_s: float = 0.0


def must_restart(
    me: Entry, alive: Collection[Entry], max_nodes: int, ended: Collection[str] = ()
) -> Restart | None:
    """Return a Restart if the round of agent `me` has to end for one of these reasons, else None.

    - A member of the round is in a different round, or waits for a new round.
    - A member's id is in `ended`: that agent ended before the job was finished. Its workers may live on.
    - The round has fewer than `max_nodes` members, and a waiting agent is linked with all running members.
    - A different round has more running members than this round, or equally many and a smaller id.
    """
    mates = [entry for entry in alive if entry.id in me.members and entry.id != me.id]
    for mate in mates:
        is_here = mate.state == RUNNING and mate.round == me.round
        if mate.state in (WAITING, RUNNING) and not is_here:
            has_left = mate.round == me.round or mate.number > me.number
            return Restart(f"{mate} is not in the round", 0.0 if has_left else LAG_HOLD_S)
    if not set(ended).isdisjoint(me.members):
        return Restart("the agent of a member has ended", ENDED_HOLD_S)
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
    """Return a log line: what the agent `me` waits for, which linked agents wait, too, and `troubles`."""
    linked = [entry for entry in alive if entry.state == WAITING and is_linked(me, entry)]
    going_on, leaving = busy(alive)
    if going_on:
        text = f"waiting to join {list_nodes(going_on)}"
    elif leaving:
        text = f"waiting for {list_nodes(leaving)} to end the round"
    else:
        text = f"waiting for more nodes, at least {min_nodes} in all"
    return "; ".join([f"{text}: here {list_nodes(linked)}", *troubles])
