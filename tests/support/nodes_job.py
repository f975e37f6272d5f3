"""Launches a job on the nodes of a Cluster, follows its progress and reads its results."""

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mingpt.base.processes import rank_of
from support.jobs import ROOT, last_step, read_history, tensor_hash
from support.nodes import Cluster, Node, NodeJob

LAUNCHES = ("folder", "hosts", "stock")
PORT = 29400
POLL_S = 0.02
FAULT_S, TRAINED_S, PAUSE_S = 15.0, 5.0, 2.0
# For torchrun's own rendezvous: a lost node is noticed in 3 s, not 15, and the last call takes 2 s, not 30.
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60,read_timeout=10"


class NodesJob:
    """A job that runs `program` with one worker per node.

    `launch`: "folder" and "hosts" are launch/elastic.sh, with a rendezvous in the shared folder or with a
    list of all nodes; "stock" is torchrun with the c10d store on the first node. `disk`: "shared", or "own"
    if each node has a run_dir on its own disk. Waits end after `limit_s` seconds. `since` is in seconds since
    1970.
    """

    def __init__(
        self,
        cluster: Cluster,
        launch: str,
        disk: str,
        minimum: int,
        settings: Mapping[str, Any],
        limit_s: float,
        program: str = "train.py",
    ) -> None:
        self.cluster, self.launch, self.disk, self.minimum = cluster, launch, disk, minimum
        self.nodes, self.settings, self.limit_s, self.program = cluster.nodes, settings, limit_s, program
        self.run_dir = (cluster.shared if disk == "shared" else cluster.disk) / "run"  # as a node sees it
        self.running: dict[Node, NodeJob] = {}

    def start(self, *nodes: Node) -> None:
        for node in nodes:
            given = [f"run_dir={self.run_dir}", *(f"{key}={value}" for key, value in self.settings.items())]
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            self.running[node] = node.start([*self.launcher(node), self.program, *given], env)

    def launcher(self, node: Node) -> list[str]:
        nodes, shared = f"{self.minimum}:{len(self.nodes)}", self.cluster.shared
        if self.launch in ("folder", "hosts"):
            hosts = ",".join(f"{other.address}:{PORT}" for other in self.nodes)
            place = str(shared / "rendezvous") if self.launch == "folder" else hosts
            options = ["--nnodes", nodes, "--nproc", "1", "--rdzv", place, "--local_addr", node.address]
            return [str(ROOT / "launch" / "elastic.sh"), *options, "--"]
        first = self.nodes[0]
        where = [f"--rdzv_endpoint={first.address}:{PORT}", f"--local-addr={node.address}"]
        where.append(f"--rdzv-conf=is_host={int(node is first)},{QUICK}")
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={nodes}", "--nproc_per_node=1"]
        return [*command, "--max-restarts=100", "--rdzv_backend=c10d", "--rdzv_id=job", *where]

    def run_dirs(self, nodes: Sequence[Node]) -> list[Path]:
        if self.disk == "shared":
            return [self.cluster.shared / "run"]
        return [node.disk / "run" for node in nodes]

    def newest_run_dir(self, nodes: Sequence[Node]) -> Path:
        """The run folder whose newest generation began last; among several, the one with the highest step."""

        def newest(run_dir: Path) -> tuple[float, int]:
            began = [entry["began"] for entry in read_history(run_dir)["generations"]]
            return max(began, default=0.0), last_step(run_dir)

        return max(self.run_dirs(nodes), key=newest)

    def progress(self, nodes: Sequence[Node]) -> Any:
        """The newest generation in run.json, with the last step in metrics.jsonl; None if either is missing.

        `began` and `seen`, the time of the last step in run.json, are in seconds since 1970.
        """
        run_dir = self.newest_run_dir(nodes)
        generations, step = read_history(run_dir)["generations"], last_step(run_dir)
        return SimpleNamespace(**generations[-1], step=step) if generations and step >= 0 else None

    def goes_on(self, nodes: Sequence[Node], since: float, workers: int | None = None) -> bool:
        """Whether the newest generation began after `since`, has completed a step and has these `workers`."""
        now = self.progress(nodes)
        is_new = now is not None and now.began >= since and now.step > now.from_step
        return is_new and workers in (None, now.workers)

    def all_train(self, since: float) -> bool:
        """Whether the newest generation has a worker on every node and has completed a step after `since`."""
        now = self.progress(self.nodes)
        is_whole = now is not None and now.workers == len(self.nodes)
        return is_whole and now.seen > since and now.step > now.from_step

    def last_step(self) -> int:
        return max(0, *map(last_step, self.run_dirs(self.nodes)))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Poll; return whether the condition holds within `limit_s`, and before the job ends on all nodes."""
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            if condition():
                return True
            if not any(job.is_running() for job in self.running.values()):
                return condition()
            time.sleep(POLL_S)
        return False

    def reach(self, step: int) -> bool:
        return self.wait_until(lambda: self.last_step() >= step)

    def seconds_until(self, condition: Callable[[], bool], since: float) -> float | None:
        holds = self.wait_until(condition)
        return round(time.time() - since, 2) if holds else None

    def longest_pause(self, nodes: Sequence[Node], since: float) -> float | None:
        """Wait until these nodes train steadily; return the longest time without a completed step (seconds).

        Time counts from `since`, when a fault began. Nodes train steadily if TRAINED_S seconds have passed
        since the last pause of PAUSE_S seconds, and FAULT_S seconds since the fault. Returns None if they do
        not.
        """
        moments, last = [since], self.progress(nodes)

        def train_again() -> bool:
            nonlocal last
            now, at = self.progress(nodes), time.time()
            if has_moved(last, now):
                moments.append(at)
                last = now
            resumed_at = max((b for a, b in itertools.pairwise(moments) if b - a > PAUSE_S), default=since)
            is_moving = at - moments[-1] < PAUSE_S
            return is_moving and at - since >= FAULT_S and at - resumed_at >= TRAINED_S

        do_train = self.wait_until(train_again)
        return round(max(b - a for a, b in itertools.pairwise(moments)), 2) if do_train else None

    def rank(self, node: Node) -> int | None:
        ranks = [rank_of(pid) for pid in self.running[node].workers()]
        return next((rank for rank in ranks if rank is not None), None)

    def exit_codes(self) -> dict[str, int | None]:
        """Wait for the job's end on the nodes that are up. The code is None where it had to be killed."""
        deadline = time.monotonic() + self.limit_s
        codes: dict[str, int | None] = {}
        for node in filter(Node.is_up, self.running):
            codes[node.name] = None
            with contextlib.suppress(TimeoutError):
                codes[node.name] = self.running[node].wait(max(0.1, deadline - time.monotonic()))
        return codes

    def hashes(self, step: int) -> set[str]:
        return {tensor_hash(run_dir, step)[:16] for run_dir in self.run_dirs(self.nodes)} - {"none"}

    def errors(self) -> str:
        texts = []
        for node, job in self.running.items():
            lines = [line[:500] for line in job.err().splitlines() if not line.startswith("step ")]
            texts.append("\n".join([f"--- {node.name}", *lines[-25:]]))
        return "\n".join(texts) + "\n"


def has_moved(last: Any, now: Any) -> bool:
    has_step = now is not None and now.step > now.from_step
    return has_step and (last is None or (now.began, now.step) > (last.began, last.step))


def listens(node: Node, port: int) -> bool:
    text = "".join(Path(f"/proc/{node.init}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    entries = [line.split() for line in text.splitlines()]
    return any(entry[1].endswith(f":{port:04X}") and entry[3] == "0A" for entry in entries)
