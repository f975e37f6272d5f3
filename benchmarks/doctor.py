"""Does the doctor find what is wrong with a cluster of three nodes, and no fault on a healthy one?

    python benchmarks/doctor.py                # 2 minutes; needs root, ip, nft, bindfs and faketime
    python benchmarks/doctor.py --only port    # half a minute

Each fault is planted on node 3, then `python -m mingpt doctor` is started as a run would be, by torchrun's
agents, whose store is on node 1. Within 60 s the doctor must name the host and the cause, say what to change,
and end the job with exit code 1 on every node (0 on the healthy cluster). It must start no second generation
and leave no file.

Prints a row per fault, as JSON; `seconds` is from the start of the agents to the end of the last one. Exit
code 1 unless the doctor meets all of this.
"""

import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from common import Tally, argument_parser, arguments_of, exit_codes, row, work_folder

from mingpt.tools.jobs import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support.nodes import Cluster, Node, why_no_cluster

PORT = 29400
LIMIT_S = 60.0
# torch reports another version, as an older installation would.
ANOTHER_TORCH = "import torch\ntorch.__version__ = torch.version.__version__ = '2.0.1'\n"
SETTINGS = {"trainer.device": "cpu", "model.n_layer": 2, "model.n_head": 2, "model.n_embd": 64}


@dataclass
class Trial:
    """The changes on node 3."""

    env: dict[str, str] = field(default_factory=dict)
    prefix: list[str] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)


Plant = Callable[[Cluster, Trial], None]


def nothing(cluster: Cluster, trial: Trial) -> None:
    pass


def wrong_interface(cluster: Cluster, trial: Trial) -> None:
    """Give the node a second card in a network of its own; its cable ends in the same node."""
    node = cluster.nodes[2]
    node.run("ip", "link", "add", "eth1", "type", "veth", "peer", "name", "end1")
    node.run("ip", "address", "add", "10.99.0.1/24", "dev", "eth1")
    for card in ("eth1", "end1"):
        node.run("ip", "link", "set", card, "up")
    trial.env = {"GLOO_SOCKET_IFNAME": "eth1"}


def blocked(cluster: Cluster, trial: Trial) -> None:
    """Set a firewall on node 3 that lets answers in, but no connections from node 2."""
    rule = f"ip saddr {cluster.nodes[1].address} tcp dport 32768-60999 tcp flags syn / syn,ack drop"
    for words in (
        "table ip wall",
        "chain ip wall in { type filter hook input priority 0 ; }",
        f"rule ip wall in {rule}",
    ):
        cluster.nodes[2].run("nft", f"add {words}")


def other_config(cluster: Cluster, trial: Trial) -> None:
    trial.settings = {"optimizer.learning_rate": "0.01"}


def other_torch(cluster: Cluster, trial: Trial) -> None:
    folder = cluster.folder / "disks" / "node3" / "another"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ANOTHER_TORCH)
    trial.env = {"PYTHONPATH": str(cluster.disk / "another")}


def other_clock(cluster: Cluster, trial: Trial) -> None:
    trial.prefix = ["faketime", "-f", "+5s"]


# {kind: (function that plants the fault, what the doctor's one sentence must say)}
FAULTS: dict[str, tuple[Plant, str]] = {
    "healthy": (nothing, ""),
    "interface": (wrong_interface, r"node3 listens on 10\.99\.0\.1, interface eth1.*SOCKET_IFNAME.* eth0"),
    "port": (blocked, r"node2 cannot connect to node3 .*no answer.*ports 32768-60999 .*of node3 to node2"),
    "config": (other_config, r"node3 is started with optimizer\.learning_rate=0\.01, the others with 0\.007"),
    "torch": (other_torch, r"node3 has torch 2\.0\.1 and the others .*pip install torch=="),
    "clock": (other_clock, r"clock of node3 differs from the others' by \+5\.0 s"),
}  # fmt: skip


def agent(cluster: Cluster, node: Node, trial: Trial) -> list[str]:
    """The command line of a node's agent."""
    conf = f"is_host={int(node.number == 1)},join_timeout=60,read_timeout=10"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc_per_node=1", "--max-restarts=5",
        "--rdzv_backend=c10d", "--rdzv_id=doctor", f"--rdzv_endpoint={cluster.nodes[0].address}:{PORT}",
        f"--rdzv-conf={conf}", f"--local-addr={node.address}", "-m", "mingpt", "doctor",
    ]  # fmt: skip
    own = {"run_dir": cluster.disk / "run"}
    settings = SETTINGS | own
    if node.number == 3:
        command, settings = [*trial.prefix, *command], settings | trial.settings
    return [*command, *arguments_of(settings)]


def examine(kind: str, folder: Path) -> bool:
    """Plant a fault, run the doctor, print a row; whether the doctor did all that it must."""
    plant, expected = FAULTS[kind]
    trial = Trial()
    with Cluster(3, folder, shared=False) as cluster:
        plant(cluster, trial)
        began = time.monotonic()
        jobs = []
        for node in cluster.nodes:
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            env |= trial.env if node.number == 3 else {}
            jobs.append(node.start(agent(cluster, node, trial), env))
        codes = exit_codes(jobs, LIMIT_S + 30)
        took_s = time.monotonic() - began
        left = [node.number for node in cluster.nodes if list(node.disk.glob("run"))]
    said = "".join(job.out() for job in jobs).splitlines()
    faults = [line for line in said if line.startswith("fault: ")]
    tables = sum(line.startswith("worker ") for line in said)
    is_good = took_s < LIMIT_S and tables == 1 and not left
    if kind == "healthy":
        is_good = is_good and codes == [0, 0, 0] and "no fault found" in said and not faults
    else:
        is_good = is_good and codes == [1, 1, 1] and len(faults) == 1 and bool(re.search(expected, faults[0]))
    shown = [line.replace(str(cluster.folder), "...") for line in faults]
    row(fault=kind, ok=is_good, seconds=round(took_s, 1), codes=codes, tables=tables, said=shown)
    return is_good


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    arguments = parser.parse_args()
    why_not = why_no_cluster()
    if why_not is None and "clock" in arguments.only and shutil.which("faketime") is None:
        why_not = "faketime is not installed, which --only without clock does not need"
    if why_not:
        print(f"error: {why_not}", file=sys.stderr)
        return 2
    tally = Tally()
    for kind in arguments.only:
        with work_folder() as folder:
            tally.add(examine(kind, folder / "cluster"))
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
