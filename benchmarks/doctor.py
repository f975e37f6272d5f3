"""Does the doctor, or the start of the trainer, name what is wrong with a cluster of three nodes?

    python benchmarks/doctor.py                # 5 minutes; needs root, ip, tc, nft, bindfs and faketime
    python benchmarks/doctor.py --only port    # half a minute

Each fault is planted, then torchrun's agents start the doctor or train.py. Within 60 s one sentence must
name the fault and the node. On every node the exit code must be 1, or 0 if the job can go on. On the healthy
cluster the doctor must find no fault. Prints a row per fault, as JSON. Exit code 1 if this does not
hold, 2 if this machine cannot run the nodes.
"""

import re
import shutil
import sys
import time
from pathlib import Path

from common import SMALL, Tally, argument_parser, arguments_of, exit_codes, row, work_folder
from support.jobs import Job
from support.nodes import Cluster, Node, why_no_cluster

LIMIT_S = 60.0
# {kind: (who names the fault, what one sentence says)}
FAULTS = {
    "healthy": ("doctor", r"no fault found"),
    "interface": ("doctor", r"node[12] and node[12] cannot connect to node3 at 10\.99\.0\.1 .*_IFNAME=eth0 "),
    "port": ("doctor", r"node2 cannot connect to node3 at .*no answer; let TCP ports 32768-60999 in"),
    "link": ("doctor", r"node3 receives [\d.]+ MB/s from node2, and [\d.]+ are usual"),
    "torch": ("doctor", r"node3: program is .* torch 2\.0\.1, on the others .*: install"),
    "clock": ("doctor", r"node3: the clock is \+[45]\.\d s off node1's: have NTP set it"),
    "data": ("train.py", r"the data in .* differ between nodes: train\.bin on node3 .*copy"),
    "config": ("train.py", r"those on node3 differ from .* \(optimizer\.learning_rate"),
    "folder": ("train.py", r"run_dir.*cannot be written to: Read-only file system \(on node3\)"),
    "memory": ("train.py", r"no snapshots in memory.*on node3"),
}
NO_FAILURE = ("healthy", "memory")
# {kind: {number of a node: commands of a shell that plant the fault there}}
COMMANDS = {
    "interface": {3: '''ip link add eth1 type veth peer name end1
        ip address add 10.99.0.1/24 dev eth1; ip link set eth1 up; ip link set end1 up'''},
    # Answers pass, connections from node 2 do not.
    "port": {3: '''nft 'add table ip wall; add chain ip wall in { type filter hook input priority 0; }'
        nft add rule ip wall in ip saddr NETWORK.2 tcp dport 32768-60999 tcp flags syn / syn,ack drop'''},
    # All links have 800 Mbit/s, and the one from node 2 to node 3 has a tenth of that.
    "link": {
        1: "tc qdisc add dev eth0 root tbf rate 800mbit burst 256k latency 50ms",
        2: '''tc qdisc add dev eth0 root handle 1: htb default 1
        tc class add dev eth0 parent 1: classid 1:1 htb rate 800mbit
        tc class add dev eth0 parent 1: classid 1:2 htb rate 80mbit
        tc filter add dev eth0 parent 1: protocol ip u32 match ip dst NETWORK.3 flowid 1:2''',
        3: "tc qdisc add dev eth0 root tbf rate 800mbit burst 256k latency 50ms",
    },
    "folder": {3: "mkdir DISK/run; mount --bind DISK/run DISK/run; mount -o remount,bind,ro DISK/run"},
    "memory": {3: "mount -t tmpfs -o size=64k tmpfs /dev/shm"},
}  # fmt: skip
# torch reports another version, as an older installation would.
ANOTHER_TORCH = "import torch\ntorch.__version__ = torch.version.__version__ = '2.0.1'\n"


def start(kind: str, node: Node) -> Job:
    """Start a node's agent. Some kinds of fault are in the agent's command, variables or files."""
    cluster, is_odd, shards = node.cluster, node.number == 3, node.disk / "shards"
    shards.mkdir()
    (shards / "train.bin").write_bytes(bytes([7, 0]) * 5000 + bytes([int(is_odd), 0]) * 100)
    (shards / "sitecustomize.py").write_text(ANOTHER_TORCH)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    settings = SMALL | {"trainer.max_steps": 2, "trainer.eval_windows": 8, "run_dir": cluster.disk / "run"}
    if kind == "data":
        settings["data.path"] = cluster.disk / "shards"
    if is_odd:
        settings |= {"optimizer.learning_rate": 0.01} if kind == "config" else {}
        env |= {"GLOO_SOCKET_IFNAME": "eth1"} if kind == "interface" else {}
        env |= {"PYTHONPATH": str(cluster.disk / "shards")} if kind == "torch" else {}
    program = ["-m", "mingpt", "doctor"] if FAULTS[kind][0] == "doctor" else ["train.py"]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=3", "--nproc_per_node=1", "--max-restarts=5",
        "--rdzv_backend=c10d", f"--rdzv_endpoint={cluster.nodes[0].address}:29400",
        f"--rdzv-conf=is_host={int(node.number == 1)},join_timeout=60", f"--local-addr={node.address}",
        *program, *arguments_of(settings),
    ]  # fmt: skip
    prefix = ["faketime", "-f", "+5s"] if kind == "clock" and is_odd else []
    return node.start([*prefix, *command], env)


def examine(kind: str, folder: Path) -> bool:
    """Plant a fault, run the program that must name it, and print a row; return whether all went well."""
    (program, expected), code = FAULTS[kind], int(kind not in NO_FAILURE)
    with Cluster(3, folder, shared=False) as cluster:
        for number, commands in COMMANDS.get(kind, {}).items():
            commands = commands.replace("NETWORK", cluster.network).replace("DISK", str(cluster.disk))
            cluster.nodes[number - 1].run("sh", "-ec", commands)
        began = time.monotonic()
        jobs = [start(kind, node) for node in cluster.nodes]
        codes = exit_codes(jobs, LIMIT_S + 30)
        took_s = time.monotonic() - began
        wrote = any((node.disk / "run").exists() for node in cluster.nodes)
    text = "".join(job.out() + job.err() for job in jobs).replace(str(cluster.folder), "...")
    lines = re.sub(r"\n {9}(?=\S)", " ", text).splitlines()  # the doctor folds its lines
    said = [line for line in lines if re.search(expected, line)]
    faults, tables = (sum(line.startswith(word) for line in lines) for word in ("fault:", "threads"))
    is_good = took_s < LIMIT_S and codes == [code] * 3 and len(said) == 1
    is_good = is_good and (program != "doctor" or ((faults, tables) == (code, 1) and not wrote))
    row(fault=kind, ok=is_good, seconds=round(took_s, 1), codes=codes, by=program, said=said)
    return is_good


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    arguments, tally = parser.parse_args(), Tally()
    why_not = why_no_cluster() or (None if shutil.which("faketime") else "faketime is not installed")
    if why_not:
        print(f"error: {why_not}", file=sys.stderr)
        return 2
    for kind in arguments.only:
        with work_folder() as folder:
            tally.add(examine(kind, folder / "cluster"))
    return tally.exit_code()


if __name__ == "__main__":
    sys.exit(main())
