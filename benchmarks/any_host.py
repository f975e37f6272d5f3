"""Kill, cut off and add nodes under a script with torch alone: does `anynode` let the others go on?

    python benchmarks/any_host.py      # each fault 5 times in a shared folder and 5 with hosts: half an hour
    python benchmarks/any_host.py --trials 1 --faults killed --places hosts      # a minute

Needs root. Three nodes in namespaces of this machine, of which two are enough, run the script
examples/any_host_may_die.py with one worker each, and keep the state on their own disks. The fault comes at a
random moment of ten seconds. `killed`: the first node, with rank 0 and the store, is killed with everything
on it, and comes back with an empty disk. `cut`: the last node loses network and storage until the others go
on. `joins`: the last node starts late.

Prints a row per trial, as JSON: `on_s` is the time from the fault to the round of the other nodes (of all, if
a node joins), `back_s` from a node's return to the round of all three. A trial is ok if all agents exit with
0, and the worker with rank 0 has found the line without beginning at step 0 again. The exit code is 1 unless
all are.
"""

import random
import re
import sys
import time

from common import Tally, argument_parser, row, work_folder
from support.jobs import wait_until
from support.nodes import Cluster, Node, NodeJob, why_no_cluster

FAULTS, PLACES, LIMIT_S = ("killed", "cut", "joins"), ("folder", "hosts"), 60


class Trial:
    """A job on three nodes, and the rounds that its workers report."""

    def __init__(self, cluster: Cluster, place: str) -> None:
        self.cluster, self.jobs = cluster, list[tuple[Node, NodeJob]]()
        hosts = ",".join(f"{node.address}:29400" for node in cluster.nodes)
        self.rdzv = hosts if place == "hosts" else str(cluster.shared / "meet")

    def start(self, node: Node) -> None:
        options = ["--nnodes", "2:3", "--nproc", "1", "--rdzv", self.rdzv, "--local_addr", node.address]
        script = ["examples/any_host_may_die.py", str(self.cluster.disk / "state")]
        job = node.start([sys.executable, "-m", "anynode", *options, "--", *script])
        self.jobs.append((node, job))

    def rounds(self) -> dict[int, tuple[int, int]]:
        """Return {number of a round: (its workers, the step from which they went on)}."""
        said = "".join(job.out() for _, job in self.jobs)
        found = re.findall(r"round (\d+): (\d+) workers, from step (\d+)", said)
        return {int(number): (int(workers), int(step)) for number, workers, step in found}

    def seconds_to_round(self, workers: int, after: int) -> float:
        """Wait until a round later than `after` with `workers` workers begins; return the seconds waited."""
        began = time.monotonic()
        wait_until(lambda: any(self.rounds()[n][0] == workers for n in self.rounds() if n > after), LIMIT_S)
        return round(time.monotonic() - began, 1)

    def run(self, fault: str, wait_s: float) -> dict[str, float | None]:
        """Start the job; bring about the fault `wait_s` seconds later; return on_s and back_s."""
        first, second, last = self.cluster.nodes
        for node in (first, second) if fault == "joins" else (first, second, last):
            self.start(node)
        self.seconds_to_round(2 if fault == "joins" else 3, after=0)
        time.sleep(wait_s)
        before = max(self.rounds())
        if fault == "joins":
            self.start(last)
            return {"on_s": self.seconds_to_round(3, before), "back_s": None}
        if fault == "killed":
            first.kill()
        else:
            last.cut() if last.cluster.has_storage else last.cut_network()
        on_s, before = self.seconds_to_round(2, before), max(self.rounds())
        if fault == "killed":
            first.boot(wipe=True)
            self.start(first)
        else:
            last.heal()
        return {"on_s": on_s, "back_s": self.seconds_to_round(3, before)}

    def ends_well(self) -> bool:
        """Wait for the end of the job on all nodes; return whether it has done its work, and only once."""
        codes = [job.wait(LIMIT_S) for node, job in self.jobs if job in node.jobs and node.is_up()]
        has_found = any("slope 3.000, offset -2.000" in job.out() for _, job in self.jobs)
        later = [step for number, (_, step) in self.rounds().items() if number > 1]
        return has_found and 0 not in later and codes[-2:] == [0, 0]


def try_once(place: str, fault: str, wait_s: float, tally: Tally) -> None:
    """Run a trial on three new nodes, and print its row."""
    with work_folder() as folder, Cluster(3, folder, shared=place == "folder") as cluster:
        trial, found, is_good = Trial(cluster, place), dict[str, float | None](), False
        try:
            found = trial.run(fault, wait_s)
            is_good = trial.ends_well()
        except TimeoutError as error:
            print(error, file=sys.stderr)
        tally.add(is_good, *(job for _, job in trial.jobs))
        row(place=place, fault=fault, wait_s=wait_s, **found, rounds=trial.rounds(), ok=is_good)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--faults", nargs="*", default=FAULTS, choices=FAULTS)
    parser.add_argument("--places", nargs="*", default=PLACES, choices=PLACES)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    reason = why_no_cluster()
    if reason:
        parser.error(reason)
    rng, tally = random.Random(options.seed), Tally()
    for place in options.places:
        for fault in options.faults:
            for _ in range(options.trials):
                try_once(place, fault, round(rng.uniform(0, 10), 1), tally)
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
