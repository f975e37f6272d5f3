"""Launches a job on the nodes of a Cluster, follows its progress and reads its results."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt.base.processes import rank_of
from mingpt.tools.jobs import ROOT
from support.jobs import read_history, tensor_hash
from support.nodes import Cluster, Node, NodeJob

LAUNCHES = ("folder", "hosts", "stock")
PORT = 29400
POLL_S = 0.02
TAIL_BYTES = 4096  # read from the end of metrics.jsonl: several records
FAULT_S, TRAINED_S, PAUSE_S = 15.0, 5.0, 2.0
# For torchrun's own rendezvous: a lost node is noticed in 3 s, not 15, and the last call takes 2 s, not 30.
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60,read_timeout=10"


@dataclass(frozen=True)
class Progress:
    """The newest generation in run.json, and `step`, the last step in metrics.jsonl.

    `from_step` is the step from which the generation started.
    """

    began: float  # seconds since 1970
    seen: float  # the time of the last step in run.json, in seconds since 1970
    workers: int
    from_step: int
    step: int


class NodesJob:
    """A job that runs `program` with one worker per node.

    `disk` is "shared" (all nodes have one run_dir) or "own" (each node has a run_dir on its own disk).
    `launch` "folder" is launch/elastic.sh with a rendezvous in the shared folder; "hosts" is elastic.sh with
    a list of all nodes; "stock" is torchrun with the c10d store on the first node. `minimum` is MIN of
    --nnodes=MIN:MAX. Methods that wait stop waiting after `limit_s` seconds. Arguments `since` are in seconds
    since 1970.
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
        assert launch in LAUNCHES and disk in ("shared", "own")
        self.cluster, self.launch, self.disk, self.minimum = cluster, launch, disk, minimum
        self.nodes, self.settings, self.limit_s = cluster.nodes, settings, limit_s
        self.program = program
        self.run_dir = (cluster.shared if disk == "shared" else cluster.disk) / "run"  # as a node sees it
        self.running: dict[Node, NodeJob] = {}

    def start(self, *nodes: Node) -> None:
        for node in nodes:
            given = [f"run_dir={self.run_dir}", *(f"{key}={value}" for key, value in self.settings.items())]
            env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            self.running[node] = node.start([*self.launcher(node), self.program, *given], env)

    def launcher(self, node: Node) -> list[str]:
        """The words that stand before the program in the node's command line."""
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
        """The run folders of these nodes, as this machine sees them."""
        if self.disk == "shared":
            return [self.cluster.shared / "run"]
        return [node.disk / "run" for node in nodes]

    def newest_run_dir(self, nodes: Sequence[Node]) -> Path:
        """The run folder whose newest generation began last; among several, the one with the highest step."""
        return max(self.run_dirs(nodes), key=lambda path: (last_began(path), last_recorded_step(path) or 0))

    def progress(self, nodes: Sequence[Node]) -> Progress | None:
        """The progress that `newest_run_dir` records; None if a generation or a step is not yet recorded."""
        run_dir = self.newest_run_dir(nodes)
        generations = read_history(run_dir)["generations"]
        step = last_recorded_step(run_dir)
        if not generations or step is None:
            return None
        last = generations[-1]
        return Progress(last["began"], last["seen"], last["workers"], last["from_step"], step)

    def goes_on(self, nodes: Sequence[Node], since: float, workers: int | None = None) -> bool:
        """Whether the newest generation on these nodes began after `since` and has completed a step.

        The generation must also have `workers` workers; None: any number.
        """
        now = self.progress(nodes)
        if now is None or now.began < since or now.step <= now.from_step:
            return False
        return workers is None or now.workers == workers

    def all_train(self, since: float) -> bool:
        """Whether the newest generation has a worker on every node and has completed a step after `since`."""
        now = self.progress(self.nodes)
        if now is None or now.workers < len(self.nodes):
            return False
        return now.seen > since and now.step > now.from_step

    def last_step(self) -> int:
        """The highest of the last steps in the nodes' metrics.jsonl files; 0 if no step is recorded."""
        return max(last_recorded_step(run_dir) or 0 for run_dir in self.run_dirs(self.nodes))

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Poll until the condition holds; return True then.

        Returns False if the condition does not hold after `limit_s`, or when the job has ended on all nodes.
        """
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            if condition():
                return True
            if not any(job.is_running() for job in self.running.values()):
                return condition()
            time.sleep(POLL_S)
        return False

    def reach(self, step: int) -> bool:
        """Wait, as `wait_until` does, until `last_step` is at least `step`; return whether it is."""
        return self.wait_until(lambda: self.last_step() >= step)

    def seconds_until(self, condition: Callable[[], bool], since: float) -> float | None:
        """The seconds from `since` until the condition holds; None if `wait_until` returns False."""
        holds = self.wait_until(condition)
        return round(time.time() - since, 2) if holds else None

    def longest_pause(self, nodes: Sequence[Node], since: float) -> float | None:
        """Wait until these nodes train steadily; return the longest time without a completed step (seconds).

        Time counts from `since`, when a fault began. Nodes train steadily if TRAINED_S seconds have passed
        since the last pause of PAUSE_S seconds, and FAULT_S seconds since the fault. Returns None if
        `wait_until` returns False.
        """
        moved_at = resumed_at = since
        last, longest = self.progress(nodes), 0.0

        def train_again() -> bool:
            nonlocal moved_at, resumed_at, last, longest
            now, at = self.progress(nodes), time.time()
            if has_moved(last, now):
                longest = max(longest, at - moved_at)
                resumed_at = at if at - moved_at > PAUSE_S else resumed_at
                moved_at, last = at, now
            is_moving = at - moved_at < PAUSE_S
            return is_moving and at - since >= FAULT_S and at - resumed_at >= TRAINED_S

        do_train = self.wait_until(train_again)
        return round(longest, 2) if do_train else None

    def rank(self, node: Node) -> int | None:
        """The rank in the environment of the node's worker; None if there is no worker."""
        for pid in self.running[node].workers():
            rank = rank_of(pid)
            if rank is not None:
                return rank
        return None

    def exit_codes(self) -> dict[str, int | None]:
        """Wait until the job has ended on the nodes that are up; return {node's name: exit code}.

        On nodes where the job has not ended after `limit_s`, kill it; the exit code is then None.
        """
        deadline = time.monotonic() + self.limit_s
        codes: dict[str, int | None] = {}
        for node, job in self.running.items():
            if not node.is_up():
                continue
            try:
                codes[node.name] = job.wait(max(0.1, deadline - time.monotonic()))
            except TimeoutError:
                codes[node.name] = None
        return codes

    def hashes(self, step: int) -> set[str]:
        """The first 16 digits of `tensor_hash`, from each run folder that has a snapshot of this step."""
        return {tensor_hash(run_dir, step)[:16] for run_dir in self.run_dirs(self.nodes)} - {"none"}

    def errors(self) -> str:
        """The last 25 lines of the job's stderr on each node, without the lines about steps."""
        texts = []
        for node, job in self.running.items():
            lines = [line[:500] for line in job.err().splitlines() if not line.startswith("step ")]
            texts.append("\n".join([f"--- {node.name}", *lines[-25:]]))
        return "\n".join(texts) + "\n"


def has_moved(last: Progress | None, now: Progress | None) -> bool:
    """Whether `now` has a completed step that `last` does not have."""
    if now is None or now.step <= now.from_step:
        return False
    return last is None or (now.began, now.step) > (last.began, last.step)


def listens(node: Node, port: int) -> bool:
    """Whether a process of the node listens on this TCP port."""
    text = "".join(Path(f"/proc/{node.init}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    entries = [line.split() for line in text.splitlines()]
    return any(entry[1].endswith(f":{port:04X}") and entry[3] == "0A" for entry in entries)


def last_began(run_dir: Path) -> float:
    """When the newest generation in run.json began, in seconds since 1970; 0 without a generation."""
    generations = read_history(run_dir)["generations"]
    return float(generations[-1]["began"]) if generations else 0.0


def last_recorded_step(run_dir: Path) -> int | None:
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            file.seek(max(0, file.seek(0, 2) - TAIL_BYTES))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    # The last line is empty, or is being written.
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else None


def recorded_losses(run_dir: Path) -> list[tuple[int, float]]:
    """(step, training loss) of the records in metrics.jsonl that have a training loss, in order."""
    try:
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    records = [json.loads(line) for line in lines]
    return [(record["step"], record["train/loss"]) for record in records if "train/loss" in record]
