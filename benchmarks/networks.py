"""Jobs on a slow network that loses packets: how long do a start, a step, a kill and a cut take?

    python benchmarks/networks.py                                   # ten networks, half an hour on two cores
    python benchmarks/networks.py --delays_ms 50 --losses_percent 1 # one of them, three minutes

Needs root. Three nodes with a worker each, of which two may train alone, are in namespaces of this machine.
Their network cards are TAP devices, joined by a program. It delays each packet by `delay_ms`, one way, plus
up to a tenth as jitter, keeps the order, and loses `loss_percent` of all packets. When the nodes have
trained, the first node is killed and replaced; then the second one is cut off and healed. The workers pause
for 1.5 s after each step, so that no run ends during a fault.

Prints a row per network, as JSON. Times are in seconds. `start_s` is from the command to the first step.
`step_s` and `longest_step_s` are the median and the maximum of the steps before the faults;
`trainer.timeout_s` must be larger. `kill_on_s` and `cut_on_s` are from the fault to a step of the two other
nodes, `kill_rejoined_s` and `cut_rejoined_s` from the replacement or the healing to a step of all three. Exit
code 1 unless every run has one generation before the faults, exit codes 0, and the hash of the first run.
"""

import itertools
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import SMALL, Tally, argument_parser, changed_program, row, work_folder
from support.jobs import read_history, read_metric
from support.nodes import Cluster, why_no_cluster
from support.nodes_job import NodesJob
from support.slow_switch import SlowSwitch

STEPS, FAULT_STEP, LIMIT_S = 80, 12, 900.0
PAUSE = "import time; events.subscribe('step_end', lambda step: time.sleep(1.5))"
SETTINGS = SMALL | {
    "trainer.batch_size": 6, "trainer.max_steps": STEPS, "trainer.eval_every": 10_000,
    "trainer.timeout_s": 30, "snapshot.every": 10, "snapshot.memory_every": 5,
}  # fmt: skip


def disturb(job: NodesJob) -> dict[str, float | None]:
    first, second, third = job.nodes
    since, found = time.time(), dict[str, float | None]()
    first.kill()
    found["kill_on_s"] = job.seconds_until(lambda: job.goes_on([second, third], since, 2), since)
    since = time.time()
    first.boot(wipe=True)
    job.start(first)
    found["kill_rejoined_s"] = job.seconds_until(lambda: job.all_train(since), since)
    job.reach(job.last_step() + 5)
    since = time.time()
    second.cut_network()
    found["cut_on_s"] = job.seconds_until(lambda: job.goes_on([first, third], since, 2), since)
    since = time.time()
    second.heal()
    found["cut_rejoined_s"] = job.seconds_until(lambda: job.all_train(since), since)
    return found


def measure(folder: Path, delay_ms: float, loss_percent: float) -> dict[str, Any]:
    found: dict[str, Any] = {"delay_ms": delay_ms, "loss_percent": loss_percent}
    switch, program = SlowSwitch(delay_ms / 1000, loss_percent / 100), changed_program(folder, PAUSE)
    with Cluster(3, folder / "cluster", shared=False, switch=switch) as cluster:
        job, began = NodesJob(cluster, "hosts", "own", 2, SETTINGS, LIMIT_S, program), time.time()
        job.start(*cluster.nodes)
        found["start_s"] = job.seconds_until(lambda: job.last_step() > 0, began)
        is_training = job.reach(FAULT_STEP)
        run_dir = job.newest_run_dir(job.nodes)
        generations = len(read_history(run_dir)["generations"])
        if is_training:
            steps = list(read_metric(run_dir, "step_s").values())[1:]
            found |= {"step_s": round(median(steps), 2), "longest_step_s": round(max(steps), 2)}
            found |= disturb(job)
        codes = set(job.exit_codes().values())
        found |= {"seconds": round(time.time() - began), "hashes": sorted(job.hashes(STEPS))}
        found["ok"] = generations == 1 and None not in found.values() and codes == {0}
        if not found["ok"]:
            sys.stderr.write(job.errors())
    return found


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--delays_ms", type=float, nargs="+", default=[5, 50, 200])
    parser.add_argument("--losses_percent", type=float, nargs="+", default=[0, 0.1, 1])
    arguments = parser.parse_args()
    why_not = why_no_cluster()
    if why_not:
        print(why_not, file=sys.stderr)
        return 2
    tally, expected = Tally(), list[str]()
    for network in [(0.0, 0.0), *itertools.product(arguments.delays_ms, arguments.losses_percent)]:
        with work_folder() as folder:
            found = measure(folder, *network)
        expected = expected or found["hashes"]
        found["ok"] = found["ok"] and len(expected) == 1 and found["hashes"] == expected
        row(**found)
        tally.add(found["ok"])
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
