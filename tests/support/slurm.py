"""A Slurm cluster on this machine: slurmctld and a slurmd per node, without munge, systemd and cgroups.

The nodes are n1, n2, ... with the addresses 127.0.0.1, 127.0.0.2, ...; every slurmd has its own port.
"""

import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import TracebackType

from mingpt.tools.jobs import ROOT, clean_environment
from support.jobs import free_port, is_alive, send_to, wait_until

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
