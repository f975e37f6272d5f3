"""Kill, cut off, freeze and add nodes: when does the job go on, what does it lose, and with which bits?

    python benchmarks/nodes.py --kills 4      # each of three nodes, 4 times on a shared disk, 4 on own: 1 h
    python benchmarks/nodes.py --kills 1 --disks own --victims 1      # and an undisturbed run: two minutes
    python benchmarks/nodes.py --cuts 2       # each node: data network, storage, both; frozen and thawed
    python benchmarks/nodes.py --grow         # 1 -> 3 -> 2 nodes while running
    python benchmarks/nodes.py --joins $(seq 0 11)      # a node lost around a join, 36 trials: an hour
    python benchmarks/nodes.py --writers 2    # both writers of a sharded state killed at once: ten minutes
    python benchmarks/nodes.py --stock        # each node killed once under torchrun's own flags

Needs root. Three nodes with one worker each, in namespaces of this machine. With a shared disk the nodes have
one run_dir, with separate disks a run_dir each. In every second round of kills, a node with an empty disk
replaces the victim. A node that is cut off or frozen is healed when the others have trained again for 5 s.
Under `--joins`, a node is killed `delay_s` seconds after a `moment` of the join of a node with an empty disk.

Prints a row per trial, as JSON. `on_s` is the time from a kill until a new generation of the other nodes has
completed a step. For any other fault, `on_s` is the longest time without a completed step until the healing.
`rejoined_s` is the time from the healing or replacement to a step of all three nodes. `lost` is the number of
steps that the other nodes computed again; `told` is this number in run.json. `one_history`: metrics.jsonl has
each step once, in order, with the losses of the undisturbed run.

Exit code 2 if this machine cannot run the nodes. Exit code 1 unless every trial except those of `--stock` is
ok (by `is_ok` and `most_lost`) and the median `on_s` of kills is at most 8 s.
"""

import argparse
import itertools
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from common import SMALL, STRATEGIES, Tally, argument_parser, changed_program, row, work_folder
from support.jobs import read_history, recorded
from support.nodes import Cluster, Node, why_no_cluster
from support.nodes_job import LAUNCHES, PORT, NodesJob, listens

from mingpt.tools.jobs import ROOT

NODES, TIMEOUT_S, MEMORY_EVERY, DISK_EVERY, MEDIAN_S = 3, 10, 5, 20, 8
SETTINGS = SMALL | {
    "model.n_embd": 64, "trainer.batch_size": 24, "trainer.eval_every": 10_000,
    "trainer.timeout_s": TIMEOUT_S, "snapshot.every": DISK_EVERY, "snapshot.memory_every": MEMORY_EVERY,
}  # fmt: skip
# Steps of a tenth of a second at least, so that 120 of them suffice however fast the machine is.
JOIN_STEPS, JOIN_SETTINGS = 120, {"trainer.timeout_s": 60, "trainer.batch_size": 6}
SLOW = "import time; events.subscribe('step_end', lambda step: time.sleep(0.1))"
KILL_STEPS, LONG_STEPS = 400, 600  # enough for the job to be training when a healed node is back
# {fault: (what inflicts it on a node, what heals the node)}
CUTS = {
    "network": (Node.cut_network, Node.heal),
    "storage": (Node.cut_storage, Node.heal),
    "both": (Node.cut, Node.heal),
    "frozen": (Node.freeze, Node.thaw),
}
ON_OWN_DISKS = ("network", "frozen")  # the other faults need storage over a network
MOMENTS = [
    *(("agent", delay_s) for delay_s in (0.0, 1.0, 2.0)),
    *(("end", delay_s) for delay_s in (0.0, 0.1, 0.3)),
    *(("round", delay_s) for delay_s in (0.0, 1.0, 2.0)),
    *(("generation", delay_s) for delay_s in (0.0, 1.0, 3.0)),
]
Found = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """A fault of node `victim` (0, 1 or 2) of a job; `disk`, `launch` and `minimum` are those of NodesJob."""

    fault: str
    victim: int
    disk: str
    launch: str
    minimum: int = 1
    is_replaced: bool = False
    steps: int = LONG_STEPS
    limit_s: float = 180.0  # for each wait
    joiner: int = 0  # the node that comes back with an empty disk, before the fault
    moment: tuple[str, float] = ("", 0.0)  # of a fault around its join; see MOMENTS
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def most_lost(self) -> int:
        is_sharded = not {"trainer.parallel", "trainer.shard_optimizer"}.isdisjoint(self.settings)
        if is_sharded and self.disk == "shared":
            return DISK_EVERY + MEMORY_EVERY
        return MEMORY_EVERY * (2 if is_sharded or self.fault == "join" else 1)


def disturb(trial: Trial, job: NodesJob, rng: random.Random) -> Found:
    if not job.reach(rng.randrange(60, 200)):
        return {"on_s": None}
    time.sleep(rng.uniform(0, 0.2))  # a random moment in a step
    victim, (inflict, heal) = job.nodes[trial.victim], CUTS.get(trial.fault, (Node.kill, None))
    others = [node for node in job.nodes if node is not victim]
    found: Found = {"rank": job.rank(victim), "hosts_rendezvous": listens(victim, PORT)}
    found["load"] = round(os.getloadavg()[0], 1)
    since = time.time()
    inflict(victim)
    found["at_step"] = job.last_step()
    if trial.fault == "kill":
        found["on_s"] = job.seconds_until(lambda: job.goes_on(others, since), since)
    else:
        found["on_s"] = job.longest_pause(others, since)
    now = job.progress(others)
    if found["on_s"] is None or now is None:
        return found
    lost = max(0, found["at_step"] - now.from_step) if now.began > since else 0
    found |= {"lost": lost, "on_workers": now.workers}
    if heal or trial.is_replaced:
        since = time.time()
        if heal:
            heal(victim)
        else:
            victim.boot(wipe=True)
            job.start(victim)
        found["rejoined_s"] = job.seconds_until(lambda: job.all_train(since), since)
    return found


def kill_writers(trial: Trial, job: NodesJob, rng: random.Random) -> Found:
    found: Found = {"on_s": None}
    if not job.reach(rng.randrange(60, 200)):
        return found
    victims = [node for node in job.nodes if job.rank(node) in (0, 1)]
    since, found["at_step"] = time.time(), job.last_step()
    for node in victims:
        os.kill(node.init, signal.SIGKILL)  # both before `Node.kill`, which waits
    for node in victims:
        node.kill()
        node.boot(wipe=trial.is_replaced)
        job.start(node)
    found["killed"] = [node.name for node in victims]
    found["on_s"] = job.seconds_until(lambda: job.goes_on(job.nodes, since), since)
    now = job.progress(job.nodes)
    return found | {"from_step": now.from_step if now and found["on_s"] else None}


def grow_and_shrink(trial: Trial, job: NodesJob, _: random.Random) -> Found:
    found: Found = {"grown_s": None, "shrunk_s": None}
    if not job.reach(100):
        return found
    since = time.time()
    job.start(*job.nodes[1:])
    found["grown_s"] = job.seconds_until(lambda: job.goes_on(job.nodes, since, NODES), since)
    if found["grown_s"] is None or not job.reach(job.last_step() + 100):
        return found
    leaver = job.nodes[trial.victim]
    others = [node for node in job.nodes if node is not leaver]
    found["rank"] = job.rank(leaver)
    since = time.time()
    os.kill(job.running.pop(leaver).pid, signal.SIGTERM)
    found["shrunk_s"] = job.seconds_until(lambda: job.goes_on(others, since, NODES - 1), since)
    return found


def lose_around_a_join(trial: Trial, job: NodesJob, rng: random.Random) -> Found:
    joiner, victim = job.nodes[trial.joiner], job.nodes[trial.victim]
    stayed = [node for node in job.nodes if node is not joiner]
    others = [node for node in job.nodes if node is not victim]
    found: Found = {"on_s": None}
    is_training = job.reach(rng.randrange(10, 20))
    since = time.time()
    joiner.kill()
    is_training = is_training and job.wait_until(lambda: job.goes_on(stayed, since, len(stayed)))
    is_training = is_training and job.reach(job.last_step() + rng.randrange(1, 6))
    if not is_training:
        return found
    joined, (moment, delay_s) = time.time(), trial.moment
    ends, rounds = said(job, stayed, "the round ends"), said(job, stayed, ": round ")
    has_come = {
        "agent": lambda: True,
        "end": lambda: said(job, stayed, "the round ends") > ends,
        "round": lambda: said(job, stayed, ": round ") > rounds,
        "generation": lambda: has_begun(job, stayed, joined),
    }
    joiner.boot(wipe=True)
    job.start(joiner)
    if not job.wait_until(has_come[moment]):
        return found
    time.sleep(delay_s)
    since, found["at_step"], found["load"] = time.time(), job.last_step(), round(os.getloadavg()[0], 1)
    victim.kill()

    def goes_on() -> bool:
        now = job.progress(others)
        has_moved = now is not None and now.workers == len(others) and now.step > now.from_step
        has_joined = victim is not joiner or has_begun(job, others, joined)
        return now is not None and has_moved and (now.began if has_joined else now.seen) > since

    found["on_s"] = job.seconds_until(goes_on, since)
    now = job.progress(others)
    if now is not None:
        # A node that was killed before it has joined interrupts no generation.
        lost = max(0, found["at_step"] - now.from_step) if now.began > since else 0
        found |= {"from_step": now.from_step, "lost": lost}
    return found


def said(job: NodesJob, nodes: Sequence[Node], text: str) -> int:
    return sum(job.running[node].err().count(text) for node in nodes)


def has_begun(job: NodesJob, nodes: Sequence[Node], since: float) -> bool:
    generations = read_history(job.newest_run_dir(nodes))["generations"]
    return bool(generations) and generations[-1]["began"] > since and generations[-1]["workers"] == NODES


def carry_out(trial: Trial, rng: random.Random, undisturbed: Found) -> Found:
    settings, began = SETTINGS | trial.settings | {"trainer.max_steps": trial.steps}, time.monotonic()
    has_storage = trial.disk == "shared" or trial.launch == "folder"
    with work_folder() as folder, Cluster(NODES, folder, shared=has_storage) as cluster:
        program = changed_program(folder, SLOW) if trial.fault == "join" else str(ROOT / "train.py")
        job = NodesJob(cluster, trial.launch, trial.disk, trial.minimum, settings, trial.limit_s, program)
        job.start(*cluster.nodes[: 1 if trial.fault == "grow" else NODES])
        ways = {"grow": grow_and_shrink, "join": lose_around_a_join, "writers": kill_writers}
        found: Found = {} if trial.fault == "none" else ways.get(trial.fault, disturb)(trial, job, rng)
        codes = job.exit_codes()
        last = job.newest_run_dir(job.nodes)
        history = read_history(last)
        keys = ("workers", "from_step", "to_step", "end")
        generations = [[entry[key] for key in keys] for entry in history["generations"]]
        found |= {"codes": codes, "status": history["status"], "told": history.get("steps_lost")}
        found |= {"generations": generations, "hashes": sorted(job.hashes(trial.steps))}
        lines = {line[:300] for node in job.running.values() for line in node.err().splitlines()}
        found["errors"] = sorted(line for line in lines if line.startswith("error:"))
        found |= {"losses": recorded(last), "seconds": round(time.monotonic() - began, 1)}
        if undisturbed:
            found["same"] = found["hashes"] == undisturbed["hashes"]
            found["one_history"] = found.pop("losses") == undisturbed["losses"]
            found["ok"] = is_ok(trial, found)
            if not found["ok"]:
                sys.stderr.write(job.errors())
    return found


def is_ok(trial: Trial, found: Found) -> bool:
    if not found["same"] or not found["one_history"] or set(found["codes"].values()) != {0}:
        is_told = len(found["errors"]) == 1 and None not in found["codes"].values()
        return trial.fault == "writers" and trial.is_replaced and is_told and not found["hashes"]
    if trial.fault == "grow":
        return found["grown_s"] is not None and found["shrunk_s"] is not None
    if found["on_s"] is None or found.get("rejoined_s", 0) is None:
        return False
    if trial.fault == "writers":
        return True  # any older snapshot will do
    if trial.fault == "join":
        return bool(found["lost"] <= trial.most_lost)
    if trial.fault == "kill":
        # run.json is written in the background, one or two steps after metrics.jsonl.
        return bool(found["lost"] <= trial.most_lost and abs(found["told"] - found["lost"]) <= 2)
    return bool(found["on_s"] <= TIMEOUT_S + 15)


def plan(arguments: argparse.Namespace) -> Iterator[Trial]:
    launch_of, number_of_kills = {"shared": "folder", "own": "hosts"}, itertools.count()
    for disk in arguments.disks:
        launch = arguments.launch or launch_of[disk]
        for number in range(arguments.kills):
            for victim in arguments.victims:
                # Each round shifts the strategies by one, so that each meets all victims in three rounds.
                turn = next(number_of_kills) + number
                strategy = arguments.strategies[turn % len(arguments.strategies)]
                given: dict[str, Any] = {"settings": STRATEGIES[strategy], "is_replaced": number % 2 == 1}
                yield Trial("kill", victim, disk, launch, steps=KILL_STEPS, **given)
        minimum = 1 if disk == "shared" else 2  # without a shared folder, only a majority goes on
        for _ in range(arguments.cuts):
            for fault in arguments.faults:
                if fault in ON_OWN_DISKS or disk == "shared":
                    for victim in arguments.victims:
                        yield Trial(fault, victim, disk, launch, minimum)
        if arguments.grow:
            for victim in (2, 0):
                yield Trial("grow", victim, disk, launch)
        if arguments.stock:
            for victim in arguments.victims:
                yield Trial("kill", victim, disk, "stock", steps=KILL_STEPS, limit_s=90)
    for number in range(arguments.writers):
        for strategy in sorted({"fsdp", "sharded"} & {*arguments.strategies}):
            given = {"settings": STRATEGIES[strategy], "is_replaced": number % 2 == 1}
            yield Trial("writers", 0, "own", "hosts", minimum=2, steps=KILL_STEPS, **given)


def plan_joins(arguments: argparse.Namespace, rng: random.Random) -> Iterator[Trial]:
    chosen = [
        ((number + number // 3) % NODES, NODES - 1, MOMENTS[number], settings)
        for number in arguments.joins
        for settings in (STRATEGIES[name] for name in arguments.strategies)
    ]
    for _ in range(arguments.random_joins):
        moment = rng.choice(MOMENTS)[0], round(rng.uniform(0, 3), 2)
        strategy = STRATEGIES[rng.choice(arguments.strategies)]
        chosen.append((rng.randrange(NODES), rng.randrange(NODES), moment, strategy))
    for victim, joiner, moment, settings in chosen:
        given = dict(settings) | JOIN_SETTINGS
        yield Trial("join", victim, "own", "hosts", 1, False, JOIN_STEPS, 600, joiner, moment, given)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--kills", type=int, default=0, metavar="N")
    parser.add_argument("--cuts", type=int, default=0, metavar="N")
    parser.add_argument("--grow", action="store_true")
    numbers = range(len(MOMENTS))
    parser.add_argument("--joins", nargs="*", type=int, choices=numbers, default=[], help="moments' numbers")
    parser.add_argument("--random_joins", type=int, default=0, metavar="N")
    parser.add_argument("--stock", action="store_true")
    parser.add_argument("--writers", type=int, default=0, metavar="N", help="rounds, on separate disks")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--disks", nargs="+", choices=("shared", "own"), default=["shared", "own"])
    parser.add_argument("--faults", nargs="+", choices=CUTS, default=CUTS, help="of --cuts")
    parser.add_argument("--victims", nargs="+", type=int, choices=range(NODES), default=range(NODES))
    parser.add_argument("--launch", choices=LAUNCHES, help="instead of folder (shared disk) and hosts (own)")
    parser.add_argument("--seed", type=int, default=1)
    arguments, why_not = parser.parse_args(), why_no_cluster()
    if why_not:
        sys.stderr.write(f"error: {why_not}\n")
        return 2
    rng, undisturbed = random.Random(arguments.seed), dict[int, Found]()
    took, tally = list[float](), Tally()
    for trial in itertools.chain(plan(arguments), plan_joins(arguments, random.Random(arguments.seed))):
        if trial.steps not in undisturbed:
            launch = arguments.launch or "folder"
            settings = JOIN_SETTINGS if trial.fault == "join" else {}
            calm = Trial("none", 0, "shared", launch, steps=trial.steps, limit_s=600, settings=settings)
            found = undisturbed[trial.steps] = carry_out(calm, rng, {})
            row(fault="none", steps=trial.steps, **{key: found[key] for key in found if key != "losses"})
        found = carry_out(trial, rng, undisturbed[trial.steps])
        kind = {"fault": trial.fault, "victim": trial.victim, "disk": trial.disk, "launch": trial.launch}
        if trial.fault == "join":
            moment, delay_s = trial.moment
            kind |= {"joiner": trial.joiner, "moment": moment, "delay_s": delay_s}
        row(**kind, **trial.settings, nodes=f"{trial.minimum}:{NODES}", replaced=trial.is_replaced, **found)
        if trial.launch != "stock":
            tally.add(found["ok"])
            if trial.fault == "kill" and found["on_s"] is not None:
                took.append(found["on_s"])
    median_s = statistics.median(took) if took else None
    code = tally.exit_code(kills_that_went_on=len(took), median_on_s=median_s)
    return code if median_s is None or median_s <= MEDIAN_S else 1


if __name__ == "__main__":
    sys.exit(main())
