"""Simulated nodes on one machine, each with its own network card, host name, processes, disk and /dev/shm.

    with Cluster(3, folder) as cluster:
        jobs = [node.start(["torchrun", ...]) for node in cluster.nodes]
        cluster.nodes[0].kill()

Needs root. Nodes are sets of Linux namespaces, joined by a bridge; bindfs mounts the shared folder on each.
The nodes' processes end with the process that made the cluster, even if a signal kills that process.
"""

import atexit
import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from support.jobs import ROOT, Job, children, clean_environment, send_to, state_of, wait_until

TIMEOUT_S = 10.0


Process = subprocess.Popen[bytes]


def start_bound(command: Sequence[str], errors: IO[str] | None = None) -> tuple[Process, bytes]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
    )
    assert process.stdout
    return process, process.stdout.readline()


def end(process: Process) -> None:
    for pipe in filter(None, (process.stdin, process.stdout)):
        pipe.close()
    process.wait(TIMEOUT_S)


class Switch:
    def __init__(self) -> None:
        # Part of an interface's name, of which the kernel takes 15 characters.
        self.name, self.count = f"{os.getpid():x}{secrets.token_hex(2)}", 0
        self.links_cut: set[str] = set()
        self.process, _ = start_bound(["unshare", "--net", "sh", "-c", "echo up; read -r _"])
        self.run("ip link add br0 type bridge")
        self.run("ip link set br0 up")

    def run(self, command: str, text: str = "", *, check: bool = True) -> None:
        whole = ["nsenter", "-t", str(self.process.pid), "--net", *command.split()]
        done = subprocess.run(whole, input=text, capture_output=True, text=True)
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()}")

    def plug_in(self, card: str) -> str:
        """Make a veth pair; return its end in the bridge. `card`: the words of `ip link` for the other end.

        Each name is new, because the kernel may remove the pair of a dead node late.
        """
        self.count += 1
        link = f"v{self.name}{self.count:x}"
        self.run(f"ip link add {link} type veth peer {card}")
        self.run(f"ip link set {link} master br0 up")
        return link

    def unplug(self, link: str) -> None:
        self.heal(link)
        self.run(f"ip link delete {link}", check=False)  # the kernel may have deleted it by now

    def cut(self, link: str) -> None:
        self.links_cut.add(link)
        self.load_rules()

    def heal(self, link: str) -> None:
        self.links_cut.discard(link)
        self.load_rules()

    def load_rules(self) -> None:
        """Make the packet filter drop IP packets of `links_cut`. ARP passes, so connections time out."""
        ends = [end for link in self.links_cut for end in (f"iifname {link}", f"oifname {link}")]
        rules = [f"{end} ether type {kind} drop" for end in ends for kind in ("ip", "ip6")]
        chain = "\n".join(["type filter hook forward priority 0;", *rules])
        self.run("nft -f -", f"flush ruleset\ntable bridge cuts {{\nchain forward {{\n{chain}\n}}\n}}\n")

    def close(self) -> None:
        end(self.process)


PROGRAMS = ("ip", "nft", "bindfs", "unshare", "nsenter", "setsid", "mount")
# $1 name, $2 the cluster's folder, $3 size of memory, then folders that are read-only in the node. The last
# line ends when the program that made the node ends. Until then the kernel reaps processes without a parent.
INIT = """
name=$1 folder=$2
hostname "$name"
mount -t tmpfs -o size="$3" tmpfs /dev/shm
mount --bind "$folder/hosts" /etc/hosts
shift 3
for path in "$@"; do mount --bind "$path" "$path"; mount -o remount,bind,ro "$path"; done
mount --bind "$folder/disks/$name" "$folder/disk"
mount --bind "$folder/shared" "$folder/storage"
mount --bind "$folder/unplugged" "$folder/shared"
mount --bind "$folder/unplugged" "$folder/disks"
ip link set lo up
trap '' CHLD
echo up
read -r _ || exit 0
"""


def why_no_cluster() -> str | None:
    """Return a reason why this machine cannot run a Cluster; None if it can."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "the test bed for several nodes needs Linux and root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [path for path in ("/dev/fuse",) if not os.path.exists(path)]
    if missing:
        return f"the test bed for several nodes needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    if tried.returncode:
        return "the test bed for several nodes needs namespaces, which this container may not make"
    return None


class NodeJob(Job):
    def __init__(self, node: "Node", command: Sequence[str], output: Path, env: dict[str, str]) -> None:
        super().__init__([*node.enter, "setsid", "env", f"--chdir={ROOT}", *command], output, cwd=ROOT, **env)
        # nsenter waits for the command as its child, and ends as that does.
        wait_until(lambda: children(self.process.pid) or not self.is_running())
        self.pid = next(iter(children(self.process.pid)), self.process.pid)


class Node:
    """A node; the constructor boots it. Its disk is `disk` outside the node, `cluster.disk` on the node."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.cluster, self.number, self.name = cluster, number, f"node{number}"
        self.address = f"{cluster.network}.{number}"
        self.disk = cluster.folder / "disks" / self.name
        self.jobs: list[NodeJob] = []
        self.init = 0  # process id of the node's first process
        self.link = ""  # the switch's end of its cable
        self.daemon: Process | None = None  # the daemon of the storage mount
        self.process: Process | None = None
        self.disk.mkdir(parents=True)
        self.boot()

    def boot(self, *, wipe: bool = False) -> None:
        """Start a node that is down, with an empty disk if `wipe`. Undoes `cut_network` and `cut_storage`."""
        assert not self.is_up(), f"{self.name} is up"
        if wipe:
            shutil.rmtree(self.disk)
        for name in ("tmp", "home"):
            (self.disk / name).mkdir(parents=True, exist_ok=True)
        self._start_init()
        self._plug_in()
        if self.cluster.has_storage:
            self._mount_storage()

    def _start_init(self) -> None:
        kinds = ["--net", "--uts", "--ipc", "--pid", "--mount"]
        read_only = dict.fromkeys(str(Path(path).resolve()) for path in (ROOT, sys.prefix, sys.base_prefix))
        given = [self.name, str(self.cluster.folder), "512m", *read_only]
        errors = self.cluster.folder / "output" / f"{self.name}.boot"
        init = ["--fork", "--kill-child", "--mount-proc", "sh", "-ec", INIT, "init", *given]
        self.process, said = start_bound(["unshare", *kinds, *init], errors.open("w"))
        if said != b"up\n":
            raise RuntimeError(f"{self.name} did not start: {errors.read_text().strip()}")
        (self.init,) = children(self.process.pid)

    def _plug_in(self) -> None:
        # The hardware address is fixed, so that peers need not learn another one after a boot.
        card = f"name eth0 address 02:00:00:00:00:{self.number:02x} netns {self.init}"
        self.link = self.cluster.switch.plug_in(card)
        self.run("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def _mount_storage(self) -> None:
        # Without caches, nodes see at once what one of them writes.
        options = "attr_timeout=0,entry_timeout=0,negative_timeout=0"
        source, target = self.cluster.folder / "storage", self.cluster.shared
        bindfs = ["bindfs", "-f", "--multithreaded", "--enable-lock-forwarding", "-o", options]
        self.daemon = subprocess.Popen(
            [*self.enter, *bindfs, str(source), str(target)], start_new_session=True
        )
        mounts = Path(f"/proc/{self.init}/mountinfo")
        wait_until(lambda: re.search(rf" {target} rw.*fuse", mounts.read_text()))
        self.run("ls", str(target))  # the daemon has begun to answer

    @property
    def enter(self) -> list[str]:
        return ["nsenter", "-t", str(self.init), "--net", "--uts", "--ipc", "--pid", "--mount"]

    def environment(self) -> dict[str, str]:
        disk = self.cluster.disk
        return {"TMPDIR": str(disk / "tmp"), "HOME": str(disk / "home")}

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> NodeJob:
        output = self.cluster.folder / "output" / f"{self.name}-{len(self.jobs)}"
        self.jobs.append(NodeJob(self, command, output, self.environment() | dict(env or {})))
        return self.jobs[-1]

    def run(self, *command: str) -> str:
        env = clean_environment(**self.environment())
        whole = [*self.enter, "env", f"--chdir={ROOT}", *command]
        return subprocess.run(whole, env=env, check=True, capture_output=True, text=True).stdout.rstrip("\n")

    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def pids(self) -> list[int]:
        """The process ids, outside the node, of the node's processes except the storage mount's daemon."""
        here = os.readlink(f"/proc/{self.init}/ns/pid")
        daemons = children(self.daemon.pid) if self.daemon else []
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # the process has just ended
                if os.readlink(path / "ns" / "pid") == here and int(path.name) not in daemons:
                    found.append(int(path.name))
        return sorted(found)

    def kill(self) -> None:
        """Kill all processes of the node; the kernel closes their connections. Then unplug the node."""
        if not self.process:
            return
        if self.is_up():
            send_to(signal.SIGKILL, [self.init])  # the kernel kills the others of the namespace with it
        # Each nsenter ends by itself, when it has reaped its command; it may be stopped.
        for outer in [self.daemon, *(job.process for job in self.jobs)]:
            if outer and outer.poll() is None:
                send_to(signal.SIGCONT, [outer.pid])
                outer.wait(TIMEOUT_S)
        end(self.process)
        self.process = self.daemon = None
        self.cluster.switch.unplug(self.link)

    def cut_network(self) -> None:
        self.cluster.switch.cut(self.link)

    def cut_storage(self) -> None:
        """Make the node's accesses to the shared folder hang until `heal`."""
        assert self.daemon, "this cluster has no shared folder"
        daemon = children(self.daemon.pid)
        send_to(signal.SIGSTOP, daemon)
        threads = [int(path.name) for pid in daemon for path in Path(f"/proc/{pid}/task").glob("*")]
        wait_until(lambda: all(state_of(thread) in "TX" for thread in threads))  # until then it may answer

    def cut(self) -> None:
        self.cut_network()
        self.cut_storage()

    def heal(self) -> None:
        self.cluster.switch.heal(self.link)
        if self.daemon:
            send_to(signal.SIGCONT, [*children(self.daemon.pid), self.daemon.pid])

    def freeze(self) -> None:
        """Stop all processes of the node but its first one and the daemon of the storage mount."""

        def are_still() -> bool:
            moving = [pid for pid in self.pids() if pid != self.init and state_of(pid) not in "TZX"]
            send_to(signal.SIGSTOP, moving)
            return not moving

        wait_until(are_still)

    def thaw(self) -> None:
        def go_on() -> bool:
            outer = [job.process.pid for job in self.jobs]
            stopped = [pid for pid in [*outer, *self.pids()] if state_of(pid) == "T"]
            send_to(signal.SIGCONT, stopped)
            return not stopped

        wait_until(go_on)


class Cluster:
    """`count` nodes in one network, with a shared folder if the argument `shared` is true.

    `shared` is that folder's path, on nodes and here. On a node, `disk` is the path of the node's own disk.
    """

    def __init__(
        self, count: int, folder: Path, *, shared: bool = True, switch: Switch | None = None
    ) -> None:
        why_not = why_no_cluster()
        if why_not:
            raise RuntimeError(why_not)
        self.folder, self.has_storage = folder.resolve(), shared
        self.shared, self.disk = self.folder / "shared", self.folder / "disk"
        self.network = f"10.77.{1 + secrets.randbelow(254)}"
        self.nodes: list[Node] = []
        for name in ("shared", "storage", "disk", "disks", "output", "unplugged"):
            (self.folder / name).mkdir(parents=True)
        names = "".join(f"{self.network}.{number} node{number}\n" for number in range(1, count + 1))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        self.switch = switch or Switch()
        atexit.register(self.close)
        for number in range(1, count + 1):
            self.nodes.append(Node(self, number))

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for node in self.nodes:
            node.kill()
        self.switch.close()
        atexit.unregister(self.close)
