"""launch/slurm/ on a real slurmctld with two slurmd: each script's run has the bits of an undisturbed run."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
from support.jobs import (
    ROOT,
    clean_environment,
    command,
    final_hash,
    free_port,
    is_alive,
    last_step,
    reached,
    read_history,
    read_metric,
    send_to,
    snapshot_steps,
    wait_until,
)

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
START_S = 30.0
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/none
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmUser={user}
SlurmdUser={user}
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
MpiDefault=none
ReturnToService=2
SchedulerType=sched/backfill
{more}
"""


class SlurmCluster:
    """A context manager that starts the daemons, and ends the daemons and all jobs after its block.

    `settings` are further settings of slurm.conf. Each element of `partitions` is a partition's line in
    slurm.conf, without `PartitionName=` and `Nodes=ALL`. Each node has two CPUs.
    """

    def __init__(self, folder: Path, settings: Mapping[str, object], partitions: Sequence[str]) -> None:
        self.folder, self.nodes = folder, ["n1", "n2"]
        self.settings, self.partitions = settings, partitions
        self.conf = folder / "slurm.conf"
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        left = {
            name: value
            for name, value in clean_environment().items()
            if not name.startswith(("SLURM_", "SBATCH_", "SRUN_"))
        }
        self.environment = left | {"SLURM_CONF": str(self.conf)}

    def __enter__(self) -> "SlurmCluster":
        (self.folder / "state").mkdir(parents=True)
        (self.folder / "spool").mkdir()
        self.write_configuration()
        try:
            self.start("slurmctld", ["slurmctld", "-D"])
            for node in self.nodes:
                self.start_node(node)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def write_configuration(self) -> None:
        host = socket.gethostname().partition(".")[0]
        lines = [f"{name}={value}" for name, value in self.settings.items()]
        for number, node in enumerate(self.nodes, 1):
            lines.append(
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.{number} Port={free_port()} "
                "CPUs=2 State=UNKNOWN"
            )
        lines += [f"PartitionName={partition} Nodes=ALL" for partition in self.partitions]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
        more = "\n".join(lines)
        text = CONFIGURATION.format(host=host, port=free_port(), user=user, folder=self.folder, more=more)
        self.conf.write_text(text)

    def start(self, name: str, command: Sequence[str]) -> None:
        with open(self.folder / f"{name}.out", "ab") as out:
            self.daemons[name] = subprocess.Popen(
                list(command), env=self.environment, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        """Start the node's slurmd, and wait until the node is idle. Raises TimeoutError after START_S."""
        self.start(node, ["slurmd", "-D", "-N", node])
        wait_until(
            lambda: node in self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N", check=False), START_S
        )

    def stop(self) -> None:
        """End the daemons, then kill all jobs: otherwise each slurmstepd would wait for slurmctld."""
        for process in self.daemons.values():
            process.terminate()
        for process in self.daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        send_to(signal.SIGKILL, self.pids_with({f"SLURM_CONF={self.conf}"}))

    def run(self, *command: str, check: bool = True, environment: Mapping[str, str] | None = None) -> str:
        env = self.environment | dict(environment or {})
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
        return done.stdout

    def submit(self, *words: str, **environment: str) -> int:
        return int(self.run("sbatch", "--parsable", *words, environment=environment))

    def job(self, number: int) -> dict[str, str]:
        return dict(re.findall(r"(\S+?)=(\S*)", self.run("scontrol", "show", "job", str(number))))

    def wait_for_state(self, number: int, *states: str, timeout_s: float = 180) -> str:
        wait_until(lambda: self.job(number)["JobState"] in states, timeout_s)
        return self.job(number)["JobState"]

    def start_again(self, number: int, restarts: int) -> None:
        """Wait until a requeued job runs and has been restarted `restarts` times.

        Slurm would start the requeued job after two minutes; this function makes Slurm start the job after
        3 s. Slurmd refuses a job that starts again within a second ("Job credential revoked").
        """

        def is_started() -> bool:
            job = self.job(number)
            if job["Reason"] == "BeginTime":
                wait = datetime.fromisoformat(job["EligibleTime"]) - datetime.now()
                if wait.total_seconds() > 10:
                    self.run("scontrol", "update", f"jobid={number}", "starttime=now+3")
            return job["JobState"] == "RUNNING" and job["Restarts"] == str(restarts)

        wait_until(is_started, 120)

    def kill_node(self, node: str) -> None:
        """Kill the node's slurmd and job processes.

        All processes get SIGSTOP first, so that none can report another's death to slurmctld.
        """
        pids = self.job_pids(node)
        daemons = {step_daemon(pid) for pid in pids} - {None}
        # All must seem to die at once, as when a machine dies. srun would end its step if it saw a slurmstepd
        # die. So the order is: srun's child (it watches srun), srun, the batch script's slurmstepd, others.
        sruns = [pid for pid in pids if name_of(pid) == "srun"]
        ended = [*sorted(sruns, reverse=True), *sorted(pid for pid in daemons if pid), *pids]
        for number in (signal.SIGSTOP, signal.SIGKILL):
            send_to(number, ended)
            self.daemons[node].send_signal(number)
        self.daemons[node].wait()

    def job_pids(self, node: str | None = None) -> list[int]:
        wanted = {f"SLURM_CONF={self.conf}"} | ({f"SLURMD_NODENAME={node}"} if node else set())
        return self.pids_with(wanted, "SLURM_JOB_ID=")

    def pids_with(self, wanted: set[str], prefix: str = "") -> list[int]:
        """The ids of living processes whose environment has all `wanted` strings of the form NAME=VALUE.

        The environment must also have a string that begins with `prefix`.
        """
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                words = set(path.read_bytes().decode(errors="replace").split("\0"))
            except OSError:
                continue  # the process has just ended
            has_prefix = any(word.startswith(prefix) for word in words)
            if wanted <= words and has_prefix and is_alive(int(path.parent.name)):
                found.append(int(path.parent.name))
        return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""  # the process has just ended


def step_daemon(pid: int) -> int | None:
    try:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None  # the process has just ended
    return parent if name_of(parent).startswith("slurmstepd") else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"no {', '.join(MISSING)}; on Debian: apt install slurm-wlm"),
]
STEPS = 80
WAIT_S = 120
# A step takes some 10 ms: Slurm takes a second to preempt a job, which must still be running then.
RUN: dict[str, Any] = {
    "trainer__batch_size": 32,
    "trainer__max_steps": STEPS,
    "trainer__eval_every": 40,
    "trainer__log_every": 5,
    "snapshot__every": 10,
}
# The scripts override the first two settings, which a cluster may have.
SETTINGS = {
    "KillOnBadExit": 1,
    "WaitTime": 2,
    "PreemptType": "preempt/partition_prio",
    "PreemptMode": "REQUEUE",
    "SchedulerParameters": "bf_interval=1,sched_interval=1,sched_min_interval=100000",
}
PARTITIONS = (
    "main Default=YES PriorityTier=1 GraceTime=30 PreemptMode=REQUEUE",
    "urgent PriorityTier=10 PreemptMode=OFF",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm") / "cluster"
    with SlurmCluster(folder, settings=SETTINGS, partitions=PARTITIONS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(reference: Callable[..., Path]) -> Path:
    """The run folder of a single worker that nothing disturbed."""
    return reference(1, **RUN)


def submit(
    cluster: SlurmCluster, script: str, folder: Path, text: Path, *options: str, **more: object
) -> int:
    """Submit a job; returns its id."""
    options = (f"--output={folder}/output", "--cpus-per-task=1", *options)
    settings = RUN | {"run_dir": folder / "run", "data__path": text, "trainer__workers": 2} | more
    words = command(launcher=options, program=f"launch/slurm/{script}", **settings)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return cluster.submit(*words, PATH=path, RENDEZVOUS=f"{folder}/meet")


def output(folder: Path) -> str:
    return (folder / "output").read_text()


def test_a_job_that_is_preempted_twice_finishes_with_the_same_bits(
    cluster: SlurmCluster, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """The first preemption is the signal before the time limit, the second for a job of higher priority."""
    run_dir = tmp_path / "run"
    job = submit(cluster, "preemptible.sbatch", tmp_path, text, "--nodes=2", snapshot__every=1000)
    wait_until(reached(run_dir, 5), WAIT_S)
    cluster.run("scancel", "--batch", "--signal=USR1", str(job))
    cluster.start_again(job, 1)
    first = snapshot_steps(run_dir)
    wait_until(reached(run_dir, first[-1] + 5), WAIT_S)
    urgent = cluster.submit(
        "--partition=urgent", "--exclusive", "--nodes=2", "--wrap=true", "--output=/dev/null"
    )
    cluster.start_again(job, 2)
    second = snapshot_steps(run_dir)
    cluster.wait_for_state(urgent, "COMPLETED")
    assert cluster.wait_for_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert cluster.job(job)["Restarts"] == "2"
    assert len(first) == 1 and len(second) == 2 and 5 <= first[0] < second[1] < STEPS
    history = read_history(run_dir)
    ends = [generation["end"] for generation in history["generations"]]
    assert ends == ["stopped by STOP", "stopped by SIGTERM", "finished"] and history["steps_lost"] == 0
    assert final_hash(run_dir, STEPS) == final_hash(undisturbed, STEPS)
    assert read_metric(run_dir) == read_metric(undisturbed)
    assert not (run_dir / "STOP").exists()


@pytest.mark.parametrize("script", ["one_node.sbatch", "preemptible.sbatch"])
def test_a_job_that_is_cancelled_leaves_a_snapshot_and_no_process(
    script: str, cluster: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = submit(cluster, script, tmp_path, text, snapshot__every=1000, trainer__max_steps=10_000)
    wait_until(reached(run_dir, 5), WAIT_S)
    pids = cluster.job_pids()
    assert len(pids) >= 3
    cluster.run("scancel", str(job))
    wait_until(lambda: not cluster.job_pids(), WAIT_S)
    cluster.wait_for_state(job, "CANCELLED")
    (stopped_at,) = snapshot_steps(run_dir)
    assert stopped_at >= 5 and read_history(run_dir)["status"] == "stopped", output(tmp_path)


@pytest.mark.parametrize("script", ["one_node.sbatch", "preemptible.sbatch"])
def test_a_mistake_in_the_settings_is_one_line_and_not_tried_again(
    script: str, cluster: SlurmCluster, text: Path, tmp_path: Path
) -> None:
    job = submit(cluster, script, tmp_path, text, optimizer__learning_rat=1)
    assert cluster.wait_for_state(job, "FAILED", "COMPLETED") == "FAILED"
    assert cluster.job(job)["ExitCode"] == "2:0" and cluster.job(job)["Restarts"] == "0"
    lines = output(tmp_path).splitlines()
    own = [line for line in lines if not line.startswith("srun: ")]  # srun's lines may come first
    assert own[0].startswith("error: ") and "learning_rate" in own[0]


@pytest.mark.parametrize("node", ["n2", "n1"])
def test_a_node_that_is_set_down_does_not_end_the_run(
    node: str, cluster: SlurmCluster, text: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """If it is the first node, the job's script dies with it; the job is queued again to end in order."""
    run_dir = tmp_path / "run"
    job = submit(cluster, "several_nodes.sbatch", tmp_path, text)
    try:
        wait_until(reached(run_dir, 5), WAIT_S)
        cluster.kill_node(node)
        cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        assert last_step(run_dir) < STEPS
        wait_until(lambda: read_history(run_dir)["status"] == "finished", WAIT_S)
    finally:
        cluster.start_node(node)
    if node == "n1":
        cluster.start_again(job, 1)
    state = cluster.wait_for_state(job, "COMPLETED", "FAILED", "NODE_FAIL")
    assert state == "COMPLETED" and cluster.job(job)["Restarts"] == str(int(node == "n1")), output(tmp_path)
    sizes = [generation["workers"] for generation in read_history(run_dir)["generations"]]
    assert sizes == [2, 1]
    assert final_hash(run_dir, STEPS) == final_hash(undisturbed, STEPS)
