"""Many agents of anynode in one process, with a virtual clock, on a network and a storage with faults.

    python tests/anynode/simulator.py --schedules 10000     # about a minute on two cores

A schedule is drawn from its seed: how many nodes, MIN and MAX of --nnodes, a folder or hosts as the place to
meet, how slow the network is, when agents start, and faults. An agent is killed with its workers, without
them, or with its host; is frozen; loses its links to some nodes, in one or both directions; hears late; or
loses its way to the place to meet. Later the fault is healed, or a new agent starts on the node. The agents run the tasks of anynode/node.py. The simulator stands in for clock,
network, boards and torchrun, and for workers: those of a round train while all of them reach each other.

A schedule fails if two rounds train at once although MIN is a majority, or although no link is cut and no
node frozen; if two agents enter rounds of one id with different members; if the number of an agent's round does not grow; if,
after CONVERGE_S seconds of one fault, no round trains although at least MIN nodes reach each other and a place
to meet; or if, after the last fault is healed, the agents do not all train in one round within CONVERGE_S
seconds.
"""

import argparse
import heapq
import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from anynode import node as protocol
from anynode.boards import FORGET_S, POST_TIMEOUT_S, Message
from anynode.decisions import FINISHED, LEFT, RUNNING, WAITING, Entry, Round
from anynode.node import Ask, Exchange, Meeting, Node, Pause, Task, Watch

START_S = 1.0  # from the beginning of a round until a node's workers are up
MONITOR_S = 0.5  # between two looks of an agent at its workers
LOST_S, SILENT_S = 0.5, 6.0  # until workers notice that a peer has ended, or is silent
LATE_S = 20.0  # the longest wait of workers for those of another node
CONVERGE_S = 60.0
SETTLED_S = 15.0  # after a cut or a freeze, two groups may train at once for so long
COARSE = {  # fewer looks at the same things, to have more schedules per second
    "POLL_S": {WAITING: 0.3, RUNNING: 0.6, FINISHED: 0.3, LEFT: 0.3}, "PING_S": 1.0, "MEET_POLL_S": 0.2,
}  # fmt: skip
FAULTS = ("kill", "orphan", "lose", "freeze", "cut", "one way", "storage", "slow")
LINKS = ("cut", "one way", "storage", "slow")  # faults that last, and no process has


@dataclass(frozen=True)
class Fault:
    """What happens to node `node` from `begin` to `end`, in virtual seconds."""

    kind: str
    node: int
    others: tuple[int, ...]
    begin: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """What a seed stands for."""

    nodes: int
    minimum: int
    hosts: tuple[int, ...]  # nodes whose agents host a board; () for a shared folder
    delay_s: float  # median one-way delay of the network
    starts: tuple[float, ...]
    faults: tuple[Fault, ...]


def draw(seed: int) -> Schedule:
    rng = random.Random(seed)
    nodes = rng.randint(2, 4)
    everybody = range(nodes)
    hosts = tuple(everybody) if rng.random() < 0.5 else ()
    faults = []
    for _ in range(rng.randint(1, 5)):
        begin, node = rng.uniform(1, 11), rng.randrange(nodes)
        others = tuple(rng.sample([one for one in everybody if one != node], rng.randint(1, nodes - 1)))
        faults.append(Fault(rng.choice(FAULTS), node, others, begin, begin + rng.uniform(0.5, 9)))
    if rng.random() < 0.2:
        node, begin = rng.randrange(nodes), max(fault.end for fault in faults)
        others = tuple(rng.sample([one for one in everybody if one != node], rng.randint(1, nodes - 1)))
        faults.append(Fault(rng.choice(FAULTS[:-1]), node, others, begin, begin + CONVERGE_S))
    return Schedule(
        nodes,
        minimum=rng.randint(1, nodes),
        hosts=hosts,
        delay_s=rng.choice((0.001, 0.02, 0.2)),
        starts=tuple(rng.uniform(0, 3) for _ in everybody),
        faults=tuple(faults),
    )


@dataclass
class Agent:
    """One agent's process, and the workers of its node."""

    number: int  # of its node
    node: Node
    is_alive: bool = True
    is_frozen: bool = False
    has_orphans: bool = False  # the agent is dead, and its workers live on
    backlog: list[Callable[[], None]] = field(
        default_factory=list
    )  # what a frozen process does when it thaws
    dozing: list[tuple[Any, Task[Any]]] = field(default_factory=list)  # tasks whose pause a change may end
    round: Round | None = None  # the round whose workers run
    started_at: float = 0.0

    @property
    def port(self) -> int:
        return self.node._entry.port


class Failure(Exception):
    """A schedule has broken a promise of the protocol."""


class Simulator:
    """The world of one schedule."""

    def __init__(self, seed: int) -> None:
        self.schedule, self.rng = draw(seed), random.Random(f"network {seed}")
        self.now, self.count = 0.0, itertools.count()
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.agents: dict[int, Agent] = {}  # the newest agent of each node, by the node's number
        self.by_port: dict[int, Agent] = {}
        self.boards: dict[str, dict[str, tuple[Entry, float]]] = {}
        self.cuts: list[Fault] = []  # links that are cut now
        self.lost_hosts: set[int] = set()
        self.last_cut = -SETTLED_S
        self.rounds: dict[str, tuple[str, ...]] = {}  # {id of a round: ids of its members}

    # Time.

    def after(self, seconds: float, work: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), work, arguments))

    def run(self) -> float:
        """Run the schedule to its end; return the virtual seconds from the last healing to convergence."""
        for number, start in enumerate(self.schedule.starts):
            self.after(start, self.start_agent, number)
        for fault in self.schedule.faults:
            self.after(fault.begin, self.begin_fault, fault)
            self.after(fault.end, self.end_fault, fault)
        healed = max(max(fault.end for fault in self.schedule.faults), *self.schedule.starts)
        while self.now < healed + CONVERGE_S:
            self.now, _, work, arguments = heapq.heappop(self.events)
            work(*arguments)
            if self.now > healed and self.has_converged():
                return self.now - healed
        states = [(one.number, one.node._entry.state, one.node._entry.number) for one in self.agents.values()]
        raise Failure(f"no common round {CONVERGE_S:g} s after the last fault: {states}")

    # Network.

    def delay(self, one: int, other: int) -> float:
        """How long a message takes now; seconds if a packet is lost again and again."""
        if any(cut.kind == "slow" and one != other and cut.node in (one, other) for cut in self.cuts):
            return self.rng.choice((0.05, 0.5, 2.0, 6.0, 15.0))
        slow = 10 if self.rng.random() < 0.02 else 1  # a packet was lost
        return self.schedule.delay_s * self.rng.uniform(0.5, 2) * slow

    def passes(self, one: int, other: int) -> bool:
        """Whether messages from node `one` reach node `other`."""
        if one in self.lost_hosts or other in self.lost_hosts:
            return one == other
        return not any(
            (cut.node == one and other in cut.others)
            or (cut.kind == "cut" and cut.node == other and one in cut.others)
            for cut in self.cuts
            if cut.kind in ("cut", "one way")
        )

    def reaches(self, one: int, other: int) -> bool:
        return one == other or (self.passes(one, other) and self.passes(other, one))

    def send(
        self, source: int, target: Agent | None, work: Callable[[], Any], timeout_s: float, done: Any
    ) -> None:
        """Let `target` do `work`, and call `done` with the result, or an OSError, at the source."""
        answered = [False]

        def answer(result: Any) -> None:
            if not answered[0]:
                answered[0] = True
                done(result)

        self.after(timeout_s, answer, TimeoutError("timed out"))
        if target is None:
            self.after(timeout_s / 2, answer, ConnectionRefusedError("refused"))
            return
        there = target.number

        def arrive() -> None:
            if not self.passes(source, there):
                return
            if not target.is_alive:
                self.after(self.delay(there, source), answer, ConnectionRefusedError("refused"))
                return
            if target.is_frozen:
                target.backlog.append(arrive)
                return
            result = work()
            if self.passes(there, source):
                self.after(self.delay(there, source), answer, result)

        self.after(self.delay(source, there), arrive)

    # Tasks.

    def resume(self, agent: Agent, task: Task[Any], result: Any = None) -> None:
        if not agent.is_alive:
            return
        if agent.is_frozen:
            agent.backlog.append(lambda: self.resume(agent, task, result))
            return
        try:
            action = task.send(result)
        except StopIteration:
            return
        if isinstance(action, Pause):
            self.pause(agent, task, action)
        elif isinstance(action, Exchange):
            self.exchange(agent, task, action)
        else:
            self.ask(agent, task, action)

    def pause(self, agent: Agent, task: Task[Any], pause: Pause) -> None:
        if pause.node is None:
            self.after(pause.seconds, self.resume, agent, task)
            return
        token = (object(), task)
        agent.dozing.append(token)
        self.after(pause.seconds, self.wake, agent, token)

    def wake(self, agent: Agent, token: tuple[Any, Task[Any]]) -> None:
        if token in agent.dozing:
            agent.dozing.remove(token)
            self.resume(agent, token[1])

    def wake_all(self, agent: Agent) -> None:
        for token in list(agent.dozing):
            self.wake(agent, token)

    def ask(self, agent: Agent, task: Task[Any], ask: Ask) -> None:
        answers: list[Any] = [None] * len(ask.agents)
        missing = [len(ask.agents)]
        if not answers:
            self.after(0.0, self.resume, agent, task, answers)

        def collect(place: int, answer: Any) -> None:
            answers[place] = answer
            missing[0] -= 1
            if missing[0] == 0:
                self.resume(agent, task, answers)

        for place, entry in enumerate(ask.agents):
            target = self.by_port.get(entry.port)

            def work(target: Agent | None = target) -> Message:
                assert target
                return self.serve(target, ask.message)

            self.send(
                agent.number, target, work, ask.timeout_s, lambda answer, place=place: collect(place, answer)
            )

    def serve(self, target: Agent, message: Message) -> Message:
        node, operation = target.node, message["op"]
        if operation == "ping":
            return {"id": node.id}
        fields = message["round"]
        proposal = Round(**fields | {"members": tuple(Entry(**one) for one in fields["members"])})
        accepts = node.promise if operation == "propose" else node.enter
        is_ok = accepts(proposal)
        if operation == "go":
            self.wake_all(target)
        return {"ok": is_ok}

    # Boards.

    def exchange(self, agent: Agent, task: Task[Any], action: Exchange) -> None:
        name: Any = action.board.name
        if name == "folder":
            if any(cut.kind == "storage" and cut.node == agent.number for cut in self.cuts):
                self.after(0.25, self.exchange, agent, task, action)  # the storage hangs
                return
            found = self.post(name, action.entry)
            self.after(self.schedule.delay_s, self.resume, agent, task, found)
            return
        host = self.agents.get(int(name))

        def done(result: Any) -> None:
            self.resume(agent, task, result)

        self.send(agent.number, host, lambda: self.post(name, action.entry), POST_TIMEOUT_S, done)

    def post(self, name: str, entry: Entry) -> list[Entry]:
        board = self.boards.setdefault(name, {})
        board[entry.id] = (entry, self.now)
        return [one for one, at in board.values() if self.now - at < FORGET_S]

    # Agents and their workers.

    def start_agent(self, number: int) -> None:
        old = self.agents.get(number)
        if number in self.lost_hosts or (old and old.is_alive):
            return
        agent: Agent

        def spawn(task: Task[None]) -> None:
            self.after(0.0, self.resume, agent, task)

        node = Node(f"node{number}", f"10.0.0.{number + 1}", 1, clock=lambda: self.now, spawn=spawn)
        node.id = f"{number}-{len(self.by_port)}"
        node._entry = Entry(id=node.id, host=f"node{number}", address=f"10.0.0.{number + 1}", port=0)
        agent = self.agents[number] = Agent(number, node)
        port = 1000 + len(self.by_port)
        self.by_port[port] = agent
        for host in self.schedule.hosts:
            if host == number:
                self.boards.pop(str(host), None)  # the memory of an earlier agent is gone
        names = [str(host) for host in self.schedule.hosts] or ["folder"]
        boards: Any = [type("SimulatedBoard", (), {"name": name})() for name in names]
        node.start(port, boards)
        self.resume(agent, self.life(agent))

    def life(self, agent: Agent) -> Task[None]:
        """What torchrun's agent does: meet, start workers, and look after them, until it is killed."""
        node, nodes = agent.node, self.schedule.nodes
        while True:
            agent.round = None
            node.wait_for_round()
            self.wake_all(agent)
            meeting = Meeting(self.schedule.minimum, nodes, began=self.now)
            round = yield from meeting.meet(node, lambda: (1, 1), lambda line: None)
            if round is None:
                return
            self.check_round(agent, round)
            agent.round, agent.started_at = round, self.now
            watch, apart_since = Watch(nodes), None
            while True:
                yield Pause(MONITOR_S)
                if watch.reason_to_end(node.view(), self.now):
                    break
                if self.now - agent.started_at < START_S or self.trains(round):
                    apart_since = None
                    continue
                apart_since = self.now if apart_since is None else apart_since
                if self.now - apart_since > self.patience_s(agent, round):
                    break

    def check_round(self, agent: Agent, round: Round) -> None:
        members = tuple(member.id for member in round.members)
        if self.rounds.setdefault(round.id, members) != members:
            raise Failure(f"two agents have different members in round {round.number}")
        if agent.round and agent.round.number >= round.number:
            raise Failure(f"node {agent.number} went from round {agent.round.number} to {round.number}")

    def members(self, round: Round) -> list[Agent]:
        return [self.by_port[member.port] for member in round.members]

    def trains(self, round: Round) -> bool:
        """Whether all workers of the round are up, and reach each other."""
        members = self.members(round)
        return all(
            (one.is_alive or one.has_orphans)
            and not one.is_frozen
            and one.round == round
            and self.now - one.started_at >= START_S
            for one in members
        ) and all(self.reaches(one.number, other.number) for one in members for other in members)

    def patience_s(self, agent: Agent, round: Round) -> float:
        """After how long workers that do not train end by themselves."""
        others = self.members(round)
        if any(not self.reaches(agent.number, one.number) or one.is_frozen for one in others):
            return SILENT_S
        have_left = any(
            not (one.is_alive or one.has_orphans) or one.round not in (None, round) for one in others
        )
        return LOST_S if have_left else LATE_S

    def training(self) -> dict[str, Round]:
        rounds = {one.round.id: one.round for one in self.agents.values() if one.round and one.is_alive}
        return {id: round for id, round in rounds.items() if self.trains(round)}

    def may_train(self) -> bool:
        """Whether MIN nodes reach each other and a place to meet."""
        up = [one.number for one in self.agents.values() if one.is_alive and not one.is_frozen]
        hung = {cut.node for cut in self.cuts if cut.kind == "storage" and not self.schedule.hosts}
        groups = itertools.combinations([one for one in up if one not in hung], self.schedule.minimum)
        return any(
            all(self.reaches(one, other) for one in group for other in group)
            and (not self.schedule.hosts or any(host in group for host in self.schedule.hosts))
            for group in groups
        )

    def check_training(self) -> None:
        found = self.training()
        is_quiet = not self.cuts and self.now - self.last_cut > SETTLED_S
        is_majority = 2 * self.schedule.minimum > self.schedule.nodes
        if len(found) > 1 and (is_majority or is_quiet):
            raise Failure(f"{len(found)} rounds train at once")

    def has_converged(self) -> bool:
        self.check_training()
        agents = self.agents.values()
        rounds = {one.round.id for one in agents if one.round}
        return (
            len(agents) == self.schedule.nodes
            and len(rounds) == 1
            and all(one.round and len(one.round.members) == self.schedule.nodes for one in agents)
            and len(self.training()) == 1
        )

    # Faults.

    def begin_fault(self, fault: Fault) -> None:
        agent = self.agents.get(fault.node)
        if fault.kind in ("kill", "orphan", "lose") and agent:
            agent.is_alive, agent.has_orphans = False, fault.kind == "orphan"
        if fault.kind == "lose":
            self.lost_hosts.add(fault.node)
        if fault.kind == "freeze" and agent:
            agent.is_frozen = True
        if fault.kind in LINKS:
            self.cuts.append(fault)
        self.check_training()

    def end_fault(self, fault: Fault) -> None:
        self.check_training()
        if fault.end - fault.begin >= CONVERGE_S and not self.training() and self.may_train():
            raise Failure(f"no round trains in {CONVERGE_S:g} s of {fault}")
        if fault.kind in ("kill", "orphan", "lose"):
            self.lost_hosts.discard(fault.node)
            self.after(0.0, self.start_agent, fault.node)
        if fault.kind == "freeze":
            agent = self.agents.get(fault.node)
            if agent and agent.is_frozen:
                agent.is_frozen, self.last_cut = False, self.now
                backlog, agent.backlog = agent.backlog, []
                for work in backlog:
                    self.after(0.0, work)
        if fault.kind in LINKS:
            self.cuts.remove(fault)
            self.last_cut = self.now


def try_seed(seed: int) -> tuple[int, float, str]:
    """Return (seed, virtual seconds to convergence, why the schedule failed or "")."""
    try:
        return seed, Simulator(seed).run(), ""
    except Failure as failure:
        return seed, CONVERGE_S, str(failure)


def try_seeds(seeds: Sequence[int]) -> list[tuple[int, float, str]]:
    vars(protocol).update(COARSE)
    return [try_seed(seed) for seed in seeds]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first_seed", type=int, default=1)
    arguments = parser.parse_args()
    began = time.monotonic()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.schedules)
    chunks = [seeds[begin : begin + 50] for begin in range(0, len(seeds), 50)]
    failed, times = 0, []
    with ProcessPoolExecutor() as processes:
        for results in processes.map(try_seeds, chunks):
            for seed, seconds, why in results:
                times.append(seconds)
                if why:
                    failed += 1
                    print(f"seed {seed}: {why}: {draw(seed)}", flush=True)
    times.sort()
    print(
        f"{len(times)} schedules from seed {seeds[0]}: {failed} failed; from the last healing to a common round "
        f"median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s (virtual); "
        f"{time.monotonic() - began:.0f} s"
    )
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
