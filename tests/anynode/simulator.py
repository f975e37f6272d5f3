"""Many agents of anynode in one process, with a virtual clock, on a network and a storage with faults.

    python tests/anynode/simulator.py --schedules 10000     # a minute on two cores
    python tests/anynode/simulator.py --schedules 1 --first_seed 77

A seed draws a schedule: the number of nodes, MIN of --nnodes (MAX is the number of nodes), a folder or hosts
as the place to meet, the delay of the network, when agents start, and faults. A fault hits one node. It kills
the agent with its workers, the agent alone, or the host; freezes agent and workers; cuts the node's links to
some nodes, in both directions or one; makes its messages seconds late; or makes its storage hang. Later the
fault is healed, or a new agent starts on the node.

The agents run the tasks of anynode/node.py. The simulator stands in for clock, network, boards and torchrun.
It also stands in for workers: those of a round train while all of them are up and reach each other.

A schedule fails if one of these promises is broken:

- Two rounds never train at once if MIN is a majority, and no agent is killed without its workers. Else they
  may, during a fault and for SETTLED_S seconds after it.
- All agents that enter a round know the same members of it. The numbers of an agent's rounds grow.
- A round trains when a fault has lasted for CONVERGE_S seconds, if MIN nodes reach each other and a board.
- Once all faults are healed, one round of all nodes trains within CONVERGE_S seconds.
"""

import argparse
import gc
import heapq
import itertools
import json
import random
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from anynode import node as protocol
from anynode.boards import FORGET_S, POST_TIMEOUT_S, Message
from anynode.decisions import FINISHED, LEFT, RUNNING, WAITING, Entry, Round
from anynode.node import Ask, Exchange, Meeting, Node, Pause, Task, Watch

START_S = 1.0  # from the beginning of a round until a node's workers are up
MONITOR_S = 1.0  # between two looks of an agent at its workers
LOST_S, SILENT_S = 0.5, 6.0  # until workers notice that a peer has ended, or is silent
LATE_S = 20.0  # the longest wait of workers for those of another node
CONVERGE_S = 60.0
SETTLED_S = 15.0
# Fewer looks at the same things, to have more schedules per second.
COARSE: dict[str, Any] = {
    "POLL_S": {WAITING: 0.5, RUNNING: 1.2, FINISHED: 0.5, LEFT: 0.5}, "PING_S": 1.5, "MEET_POLL_S": 0.4,
}  # fmt: skip
DEATHS = ("kill", "orphan", "lose")  # orphan: the agent alone; lose: the host
FAULTS = (*DEATHS, "freeze", "cut", "one way", "storage", "slow")
LATE = (0.05, 0.5, 2.0, 6.0, 15.0)  # delays of a slow node's messages, in seconds


@dataclass(frozen=True)
class Fault:
    """What happens to node `node` from `begin` to `end`, in virtual seconds."""

    kind: str
    node: int
    others: tuple[int, ...]  # the nodes whose links to `node` are cut
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    nodes: int
    minimum: int
    hosts: tuple[int, ...]  # nodes whose agents host a board; () for a shared folder
    delay_s: float  # of most messages, one way
    starts: tuple[float, ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed; in every twentieth, the last fault lasts for CONVERGE_S seconds."""
    rng = random.Random(seed)
    nodes = rng.randint(2, 4)
    faults: list[Fault] = []
    for _ in range(rng.randint(1, 5)):
        node, begin = rng.randrange(nodes), rng.uniform(1, 8)
        others = rng.sample([other for other in range(nodes) if other != node], rng.randint(1, nodes - 1))
        faults.append(Fault(rng.choice(FAULTS), node, tuple(others), begin, begin + rng.uniform(0.5, 9)))
    if rng.random() < 0.05 and faults[-1].kind != "slow":
        last, begin = faults[-1], max(fault.end for fault in faults)
        faults[-1] = Fault(last.kind, last.node, last.others, begin, begin + CONVERGE_S)
    return Schedule(
        nodes,
        minimum=rng.randint(1, nodes),
        hosts=tuple(range(nodes)) if rng.random() < 0.5 else (),
        delay_s=rng.choice((0.001, 0.02, 0.2)),
        starts=tuple(rng.uniform(0, 3) for _ in range(nodes)),
        faults=tuple(faults),
    )


@dataclass
class Agent:
    number: int  # of its node
    node: Node
    is_alive: bool = True
    is_frozen: bool = False
    has_orphans: bool = False  # the agent is dead, and its workers live on
    backlog: list[Callable[[], Any]] = field(default_factory=list)  # what it does once it is no longer frozen
    round: Round | None = None  # the round whose workers run
    started_at: float = 0.0


class SeededIds:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def uuid4(self) -> uuid.UUID:
        return uuid.UUID(int=self.rng.getrandbits(128))


class Failure(Exception):
    """A schedule has broken a promise of the protocol."""


class Simulator:
    def __init__(self, seed: int) -> None:
        self.schedule, self.rng = draw(seed), random.Random(f"network {seed}")
        self.now, self.count = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[[], Any], Agent | None]] = []
        self.newest: dict[int, Agent] = {}  # the newest agent of each node, by the node's number
        self.agents: dict[str, Agent] = {}  # all agents, by their ids
        self.boards: dict[str, dict[str, tuple[Entry, float]]] = {}
        self.faults: list[Fault] = []  # those that last
        self.healed_at = -SETTLED_S
        self.members: dict[str, tuple[str, ...]] = {}  # {id of a round: ids of its members}

    def run(self) -> float:
        """Run the schedule to its end; return the virtual seconds from the last healing to a common round."""
        for number, start in enumerate(self.schedule.starts):
            self.after(start, partial(self.start_agent, number))
        for fault in self.schedule.faults:
            self.after(fault.begin, partial(self.begin_fault, fault))
            self.after(fault.end, partial(self.end_fault, fault))
        healed = max(*(fault.end for fault in self.schedule.faults), *self.schedule.starts)
        checked_at = 0.0
        while self.now < healed + CONVERGE_S:
            self.now, _, work, agent = heapq.heappop(self.events)
            if agent is None or (agent.is_alive and not agent.is_frozen):
                work()
            elif agent.is_alive:
                agent.backlog.append(work)
            if self.now > checked_at + 0.5:
                checked_at = self.now
                self.check_training()
                if self.now > healed and self.has_converged():
                    return self.now - healed
        states = [(one.number, one.node.view().me.state, one.round) for one in self.newest.values()]
        raise Failure(f"no common round {CONVERGE_S:g} s after the last fault: {states}")

    def after(self, seconds: float, work: Callable[[], Any], agent: Agent | None = None) -> None:
        """Do `work` after so many virtual seconds, in the process of `agent`, if one is given."""
        heapq.heappush(self.events, (self.now + seconds, next(self.count), work, agent))

    # The network.

    def has_fault(self, node: int, *kinds: str) -> bool:
        return any(fault.node == node and fault.kind in kinds for fault in self.faults)

    def delay(self, one: int, other: int) -> float:
        if one != other and (self.has_fault(one, "slow") or self.has_fault(other, "slow")):
            return self.rng.choice(LATE)
        packet_was_lost = self.rng.random() < 0.02
        return self.schedule.delay_s * self.rng.uniform(0.5, 2) * (10 if packet_was_lost else 1)

    def passes(self, one: int, other: int) -> bool:
        for fault in self.faults:
            if fault.kind == "lose" and one != other and fault.node in (one, other):
                return False
            if fault.kind in ("cut", "one way") and fault.node == one and other in fault.others:
                return False
            if fault.kind == "cut" and fault.node == other and one in fault.others:
                return False
        return True

    def reaches(self, one: int, other: int) -> bool:
        return self.passes(one, other) and self.passes(other, one)

    def send(
        self,
        source: Agent,
        target: Agent | None,
        work: Callable[[Agent], Any],
        timeout_s: float,
        done: Callable[[Any], None],
    ) -> None:
        """Let `target` do `work`. `done` gets the result, or an OSError, in the process of `source`."""
        if target is None:
            self.after(timeout_s, lambda: done(ConnectionRefusedError("refused")), source)
            return
        deadline = self.now + timeout_s
        there, back = (self.delay(source.number, target.number) for _ in range(2))
        is_in_time = there + back < timeout_s
        if not is_in_time:
            self.after(timeout_s, lambda: done(TimeoutError("timed out")), source)

        def arrive() -> None:
            result: Any = TimeoutError("timed out")
            wait_s = max(0.0, deadline - self.now)
            if self.passes(source.number, target.number):
                if target.is_alive and target.is_frozen:
                    target.backlog.append(lambda: work(target))
                else:
                    answer = work(target) if target.is_alive else ConnectionRefusedError("refused")
                    if self.passes(target.number, source.number):
                        result, wait_s = answer, back
            if is_in_time:
                self.after(wait_s, lambda: done(result), source)

        self.after(there, arrive)

    # The tasks of agents.

    def resume(self, agent: Agent, task: Task[Any], result: Any = None) -> None:
        try:
            action = task.send(result)
        except StopIteration:
            return
        if isinstance(action, Pause):  # a change of the state ends no pause here: a thread may be late
            self.after(action.seconds, lambda: self.resume(agent, task), agent)
        elif isinstance(action, Exchange):
            self.exchange(agent, task, action)
        else:
            self.ask(agent, task, action)

    def ask(self, agent: Agent, task: Task[Any], ask: Ask) -> None:
        answers: dict[str, Any] = {entry.id: None for entry in ask.agents}
        missing = set(answers)

        def collect(id: str, answer: Any) -> None:
            answers[id] = answer
            missing.discard(id)
            if not missing:
                self.resume(agent, task, list(answers.values()))

        for entry in ask.agents:
            # On hosts that hold boards, a new agent has the port of its predecessor.
            there = self.agents[entry.id].number
            target = self.newest[there] if self.schedule.hosts else self.agents[entry.id]
            self.send(
                agent,
                target,
                lambda target: self.serve(target, ask.message),
                ask.timeout_s,
                partial(collect, entry.id),
            )
        if not missing:
            self.after(0.0, lambda: self.resume(agent, task, []), agent)

    def serve(self, target: Agent, message: Message) -> Any:
        received: dict[str, Any] = json.loads(json.dumps(message))
        return target.node.operations()[received["op"]](received)

    def exchange(self, agent: Agent, task: Task[Any], action: Exchange) -> None:
        if not self.schedule.hosts:
            if self.has_fault(agent.number, "storage"):
                self.after(0.25, lambda: self.exchange(agent, task, action), agent)
                return
            found = self.post("folder", action.entry)
            self.after(self.schedule.delay_s, lambda: self.resume(agent, task, found), agent)
            return
        name = action.board.name
        self.send(
            agent,
            self.newest.get(int(name)),
            lambda target: self.post(name, action.entry),
            POST_TIMEOUT_S,
            lambda result: self.resume(agent, task, result),
        )

    def post(self, name: str, entry: Entry) -> list[Entry]:
        board = self.boards.setdefault(name, {})
        board[entry.id] = (entry, self.now)
        return [posted for posted, at in board.values() if self.now - at < FORGET_S]

    # Agents and their workers.

    def start_agent(self, number: int) -> None:
        old = self.newest.get(number)
        if self.has_fault(number, *DEATHS) or (old and old.is_alive):
            return

        def spawn(task: Task[None]) -> None:
            self.after(0.0, lambda: self.resume(agent, task), agent)

        node = Node(f"node{number}", f"10.0.0.{number + 1}", 1, clock=lambda: self.now, spawn=spawn)
        agent = self.newest[number] = self.agents[node.id] = Agent(number, node)
        self.boards.pop(str(number), None)  # the memory of an earlier agent is gone
        names = [str(host) for host in self.schedule.hosts] or ["folder"]
        boards: list[Any] = [SimpleNamespace(name=name) for name in names]
        node.start(29400, boards)
        self.resume(agent, self.live(agent))

    def live(self, agent: Agent) -> Task[None]:
        """Do what torchrun's agent does: meet, start workers, and look after them, until it is killed."""
        node, nodes = agent.node, self.schedule.nodes
        while True:
            agent.round = None
            node.wait_for_round()
            meeting = Meeting(self.schedule.minimum, nodes, began=self.now)
            before = node.view().me.number
            round = yield from meeting.meet(node, lambda: (1, 1), lambda line: None)
            if round is None:
                return
            members = tuple(member.id for member in round.members)
            if self.members.setdefault(round.id, members) != members:
                raise Failure(f"two agents have different members in round {round.number}")
            if round.number <= before:
                raise Failure(f"node {agent.number} went from round {before} to {round.number}")
            agent.round, agent.started_at = round, self.now
            watch, apart_since = Watch(nodes), self.now
            while not watch.reason_to_end(node.view(), self.now):
                if self.now - agent.started_at < START_S or self.trains(round):
                    apart_since = self.now
                if self.now - apart_since > self.patience_s(agent, round):
                    break
                yield Pause(MONITOR_S)

    def mates(self, round: Round) -> list[Agent]:
        return [self.agents[member.id] for member in round.members]

    def trains(self, round: Round) -> bool:
        """Return whether all workers of the round are up, and reach each other."""
        mates = self.mates(round)
        return all(
            (mate.is_alive or mate.has_orphans)
            and not mate.is_frozen
            and mate.round == round
            and self.now - mate.started_at >= START_S
            for mate in mates
        ) and all(self.reaches(one.number, other.number) for one in mates for other in mates)

    def patience_s(self, agent: Agent, round: Round) -> float:
        """Return after how long workers of `agent` that do not train end by themselves."""
        mates = self.mates(round)
        if any(not self.reaches(agent.number, mate.number) or mate.is_frozen for mate in mates):
            return SILENT_S
        have_left = any(not (mate.is_alive or mate.has_orphans) for mate in mates)
        return LOST_S if have_left or any(mate.round not in (None, round) for mate in mates) else LATE_S

    def training(self) -> list[Round]:
        agents = self.newest.values()
        rounds = {agent.round.id: agent.round for agent in agents if agent.round and agent.is_alive}
        return [round for round in rounds.values() if self.trains(round)]

    def may_train(self) -> bool:
        """Return whether MIN nodes reach each other and a board."""
        hosts = self.schedule.hosts
        up = [agent.number for agent in self.newest.values() if agent.is_alive and not agent.is_frozen]
        able = [number for number in up if hosts or not self.has_fault(number, "storage")]
        groups = itertools.combinations(able, self.schedule.minimum)
        return any(all(self.reaches(one, other) for one in group for other in group) for group in groups)

    def check_training(self) -> None:
        is_quiet = not self.faults and self.now - self.healed_at > SETTLED_S
        has_orphans = any(fault.kind == "orphan" for fault in self.schedule.faults)
        is_majority = 2 * self.schedule.minimum > self.schedule.nodes and not has_orphans
        if (is_majority or is_quiet) and len(self.training()) > 1:
            raise Failure("two rounds train at once")

    def has_converged(self) -> bool:
        rounds, agents = self.training(), self.newest.values()
        is_one = len(rounds) == 1 and len(rounds[0].members) == self.schedule.nodes
        return is_one and all(agent.round == rounds[0] for agent in agents)

    # Faults.

    def begin_fault(self, fault: Fault) -> None:
        self.faults.append(fault)
        agent = self.newest.get(fault.node)
        if agent and fault.kind in DEATHS:
            agent.is_alive, agent.has_orphans = False, fault.kind == "orphan"
        if agent and fault.kind == "freeze":
            agent.is_frozen = True

    def end_fault(self, fault: Fault) -> None:
        if fault.end - fault.begin >= CONVERGE_S and not self.training() and self.may_train():
            raise Failure(f"no round trains in {CONVERGE_S:g} s of {fault}")
        self.faults.remove(fault)
        self.healed_at = self.now
        agent = self.newest.get(fault.node)
        if fault.kind in DEATHS:
            self.start_agent(fault.node)
        elif agent and agent.is_frozen and not self.has_fault(fault.node, "freeze"):
            agent.is_frozen = False
            for work in agent.backlog:
                self.after(0.0, work, agent)
            agent.backlog = []


def try_seed(seed: int) -> tuple[int, float, str]:
    """Return (seed, virtual seconds to a common round, why the schedule failed or "")."""
    rng = random.Random(f"protocol {seed}")
    stand_ins = COARSE | {"random": rng, "uuid": SeededIds(rng)}
    with mock.patch.multiple(protocol, **stand_ins):
        try:
            return seed, Simulator(seed).run(), ""
        except Failure as failure:
            return seed, CONVERGE_S, str(failure)


def try_seeds(seeds: Sequence[int]) -> list[tuple[int, float, str]]:
    gc.disable()  # it would take a tenth of the time
    results = [try_seed(seed) for seed in seeds]
    gc.enable()
    return results


def main() -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first_seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.schedules)
    chunks = [seeds[begin : begin + 50] for begin in range(0, len(seeds), 50)]
    with ProcessPoolExecutor() as processes:
        results = [result for results in processes.map(try_seeds, chunks) for result in results]
    failed = [(seed, why) for seed, _, why in results if why]
    for seed, why in failed:
        print(f"seed {seed}: {why}: {draw(seed)}")
    times = sorted(seconds for _, seconds, _ in results)
    print(
        f"{len(times)} schedules from seed {seeds[0]}: {len(failed)} failed; a common round after the last "
        f"fault took {times[len(times) // 2]:.1f} s (median), {times[-1]:.1f} s (longest), virtual; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
