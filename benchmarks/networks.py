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

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import struct
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

from common import SMALL, Tally, argument_parser, changed_program, row, work_folder
from support.jobs import read_history, read_metric
from support.nodes import Cluster, Switch, why_no_cluster
from support.nodes_job import NodesJob

STEPS, FAULT_STEP, LIMIT_S = 80, 12, 900.0
PAUSE = "import time; events.subscribe('step_end', lambda step: time.sleep(1.5))"
SETTINGS = SMALL | {
    "trainer.batch_size": 6, "trainer.max_steps": STEPS, "trainer.eval_every": 10_000,
    "trainer.timeout_s": 30, "snapshot.every": 10, "snapshot.memory_every": 5,
}  # fmt: skip
TUN_SET_INTERFACE, TAP, NO_HEADER = 0x400454CA, 0x2, 0x1000  # of linux/if_tun.h
ARP = b"\x08\x06"


class Wire:
    """The program that joins the cards: it reads commands from stdin, and frames from TAP devices."""

    def __init__(self, delay_s: float, loss: float) -> None:
        self.delay_s, self.loss, self.rng, self.count = delay_s, loss, random.Random(1), itertools.count()
        self.taps: dict[str, int] = {}  # {name: file descriptor}
        self.cards: dict[bytes, str] = {}  # {hardware address: name}
        self.cut: set[str] = set()
        self.due: list[tuple[float, int, str, bytes]] = []
        self.last: dict[tuple[str, str], float] = {}  # when the newest frame between two taps is due

    def run(self) -> None:
        while True:
            wait_s = max(0.0, self.due[0][0] - time.monotonic()) if self.due else 1.0
            ready, _, _ = select.select([0, *self.taps.values()], [], [], wait_s)
            if 0 in ready:
                words = os.read(0, 1000).decode().split()
                if not words:
                    return
                self.obey(*words)
            # A node that is dead, or not up yet, neither sends nor receives.
            for name in [name for name, tap in self.taps.items() if tap in ready]:
                with contextlib.suppress(OSError):
                    self.pass_on(name, os.read(self.taps[name], 65536))
            while self.due and self.due[0][0] <= time.monotonic():
                _, _, name, frame = heapq.heappop(self.due)
                with contextlib.suppress(OSError, KeyError):
                    os.write(self.taps[name], frame)

    def obey(self, command: str, name: str) -> None:
        if command == "add":
            tap = self.taps[name] = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            fcntl.ioctl(tap, TUN_SET_INTERFACE, struct.pack("16sH22x", name.encode(), TAP | NO_HEADER))
        elif command == "remove":
            os.close(self.taps.pop(name))
        elif command == "cut":
            self.cut.add(name)
        else:
            self.cut.discard(name)
        print("done", flush=True)

    def pass_on(self, name: str, frame: bytes) -> None:
        self.cards[frame[6:12]] = name
        target = self.cards.get(frame[:6])
        for other in [target] if target else [other for other in self.taps if other != name]:
            is_cut = not self.cut.isdisjoint((name, other)) and frame[12:14] != ARP
            if not is_cut and self.rng.random() >= self.loss:
                due = time.monotonic() + self.delay_s * self.rng.uniform(1, 1.1)
                due = self.last[name, other] = max(due, self.last.get((name, other), 0.0))
                heapq.heappush(self.due, (due, next(self.count), other, frame))


class SlowSwitch(Switch):
    """A Switch whose links are joined by a Wire."""

    def __init__(self, delay_s: float, loss: float) -> None:
        super().__init__()
        enter = ["nsenter", "-t", str(self.process.pid), "--net"]
        words = [*enter, sys.executable, __file__, "--wire", str(delay_s), str(loss)]
        self.wire = subprocess.Popen(words, stdin=-1, stdout=-1, text=True, bufsize=1)

    def tell(self, command: str, link: str) -> None:
        assert self.wire.stdin and self.wire.stdout
        self.wire.stdin.write(f"{command} {link}\n")
        if self.wire.stdout.readline() != "done\n":
            raise RuntimeError(f"the wire could not {command} {link}")

    def plug_in(self, card: str) -> str:
        self.count += 1
        link = f"v{self.name}{self.count:x}"
        self.tell("add", link)
        self.run(f"ip link set {link} {card}")
        return link

    def unplug(self, link: str) -> None:
        self.tell("remove", link)

    def cut(self, link: str) -> None:
        self.tell("cut", link)

    def heal(self, link: str) -> None:
        self.tell("heal", link)

    def close(self) -> None:
        self.wire.communicate()  # closes its stdin, so it ends
        super().close()


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
    if sys.argv[1:2] == ["--wire"]:
        Wire(*map(float, sys.argv[2:])).run()
        return 0
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
