"""Does the doctor, or the start of the trainer, name what is wrong with a cluster of three nodes?

    python benchmarks/doctor.py                # 5 minutes; needs root, ip, tc, nft, bindfs and faketime
    python benchmarks/doctor.py --only port    # half a minute

Each fault is planted, then the doctor or train.py is started by torchrun's agents, whose store is on node 1.
Within 60 s one sentence must name the node, and the job must end with the right exit code on every node. The
doctor must start no second generation, leave no file, and find no fault on the healthy cluster. Prints a row
per fault, as JSON; `seconds` is from the start of the agents to the end of the last one. Exit code 1 unless
all faults are named.
"""

import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from common import SMALL, Tally, argument_parser, arguments_of, exit_codes, row, work_folder

from mingpt.tools.jobs import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from support.jobs import Job
from support.nodes import Cluster, Node, why_no_cluster

LIMIT_S = 60.0
DOCTOR, TRAINER = ["-m", "mingpt", "doctor"], ["train.py"]
SETTINGS = SMALL | {"trainer.max_steps": 2}
# All of a node's links have 800 Mbit/s, and the one to ADDRESS has a tenth of that.
SLOW_LINK = """
tc qdisc add dev eth0 root handle 1: htb default 1
tc class add dev eth0 parent 1: classid 1:1 htb rate 800mbit
tc class add dev eth0 parent 1: classid 1:2 htb rate 80mbit
tc filter add dev eth0 parent 1: protocol ip u32 match ip dst ADDRESS flowid 1:2
"""
# The cable of the second card ends in the same node.
SECOND_CARD = """
ip link add eth1 type veth peer name end1
ip address add 10.99.0.1/24 dev eth1
ip link set eth1 up
ip link set end1 up
"""
# Answers pass, connections from ADDRESS do not.
FIREWALL = """
nft add table ip wall
nft add chain ip wall in { type filter hook input priority 0 ; }
nft add rule ip wall in ip saddr ADDRESS tcp dport 32768-60999 tcp flags syn / syn,ack drop
"""
READ_ONLY = """
mkdir DISK/run
mount --bind DISK/run DISK/run
mount -o remount,bind,ro DISK/run
"""
LITTLE_MEMORY = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
# torch reports another version, as an older installation would.
ANOTHER_TORCH = "import torch\ntorch.__version__ = torch.version.__version__ = '2.0.1'\n"


def run(node: Node, commands: str, address: str = "") -> None:
    for line in commands.strip().splitlines():
        node.run(*line.replace("ADDRESS", address).replace("DISK", str(node.cluster.disk)).split())


def slow_link(nodes: Sequence[Node]) -> None:
    """Make only the link from node 2 to node 3 slow."""
    for node in (nodes[0], nodes[2]):
        run(node, "tc qdisc add dev eth0 root tbf rate 800mbit burst 256k latency 50ms")
    run(nodes[1], SLOW_LINK, nodes[2].address)


def other_torch(nodes: Sequence[Node]) -> None:
    (nodes[2].disk / "another").mkdir()
    (nodes[2].disk / "another" / "sitecustomize.py").write_text(ANOTHER_TORCH)


def other_shards(nodes: Sequence[Node]) -> None:
    for node in nodes:
        (node.disk / "shards").mkdir()
        (node.disk / "shards" / "a.bin").write_bytes(bytes(100) + bytes([node.number // 3]) * 20_000)


Plant = Callable[[Sequence[Node]], None]
# {kind: (what is started, how the fault is planted, what one sentence says, exit code)}
FAULTS: dict[str, tuple[list[str], Plant, str, int]] = {
    "healthy": (DOCTOR, lambda nodes: None, "no fault found", 0),
    "interface": (
        DOCTOR, lambda nodes: run(nodes[2], SECOND_CARD),
        r"node[12] and node[12] cannot connect to node3 at 10\.99\.0\.1 \(eth1\).*GLOO_SOCKET_IFNAME=eth0", 1,
    ),
    "port": (
        DOCTOR, lambda nodes: run(nodes[2], FIREWALL, nodes[1].address),
        r"node2 cannot connect to node3 at .*no answer; open TCP ports 32768-60999 there", 1,
    ),
    "link": (DOCTOR, slow_link, r"node3 receives [\d.]+ MB/s from node2, and [\d.]+ are usual", 1),
    "torch": (DOCTOR, other_torch, r"node3: program is .* torch 2\.0\.1, on the others .*: install", 1),
    "clock": (DOCTOR, lambda nodes: None, r"node3: the clock is \+[45]\.\d s off node1's: have NTP", 1),
    "data": (TRAINER, other_shards, r"token shards in .* differ between nodes: a\.bin on node3 .*copy", 1),
    "config": (TRAINER, lambda nodes: None, r"those on node3 differ from .* \(optimizer\.learning_rate", 1),
    "folder": (TRAINER, lambda nodes: run(nodes[2], READ_ONLY), r"run_dir.*Read-only.*\(on node3\)", 1),
    "memory": (TRAINER, lambda nodes: run(nodes[2], LITTLE_MEMORY), r"no snapshots in memory.*on node3", 0),
}  # fmt: skip


def start(kind: str, node: Node) -> Job:
    """Start a node's agent; some faults are in its command line or environment."""
    cluster, is_odd = node.cluster, node.number == 3
    settings = SETTINGS | {"run_dir": cluster.disk / "run"}
    settings |= {"data.path": cluster.disk / "shards", "data.tokenizer": "gpt2"} if kind == "data" else {}
    settings |= {"optimizer.learning_rate": 0.01} if kind == "config" and is_odd else {}
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth1" if kind == "interface" and is_odd else "eth0"}
    env |= {"PYTHONPATH": str(cluster.disk / "another")} if kind == "torch" and is_odd else {}
    command = [
        *(["faketime", "-f", "+5s"] if kind == "clock" and is_odd else []),
        sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc_per_node=1", "--max-restarts=5",
        "--rdzv_backend=c10d", "--rdzv_id=doctor", f"--rdzv_endpoint={cluster.nodes[0].address}:29400",
        f"--rdzv-conf=is_host={int(node.number == 1)},join_timeout=60,read_timeout=10",
        f"--local-addr={node.address}", *FAULTS[kind][0],
    ]  # fmt: skip
    return node.start([*command, *arguments_of(settings)], env)


def examine(kind: str, folder: Path) -> bool:
    """Plant a fault, run what must name it, print a row; whether that did all that it must."""
    program, plant, expected, code = FAULTS[kind]
    with Cluster(3, folder, shared=False) as cluster:
        plant(cluster.nodes)
        began = time.monotonic()
        jobs = [start(kind, node) for node in cluster.nodes]
        codes = exit_codes(jobs, LIMIT_S + 30)
        took_s = time.monotonic() - began
        is_clean = program is TRAINER or not any((node.disk / "run").exists() for node in cluster.nodes)
    text = "".join(job.out() + job.err() for job in jobs).replace(str(cluster.folder), "...")
    lines = re.sub(r"\n {9}(?=\S)", " ", text).splitlines()  # the doctor folds its lines
    said = [line for line in lines if re.search(expected, line)]
    found = (
        sum(line.startswith("fault:") for line in lines),
        sum(line.startswith("threads") for line in lines),
    )
    is_good = took_s < LIMIT_S and codes == [code] * 3 and len(said) == 1 and is_clean
    is_good = is_good and found == ((code, 1) if program is DOCTOR else (0, 0))
    row(fault=kind, ok=is_good, seconds=round(took_s, 1), codes=codes, by=program[-1], said=said)
    return is_good


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    arguments = parser.parse_args()
    why_not = why_no_cluster() or (None if shutil.which("faketime") else "faketime is not installed")
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
