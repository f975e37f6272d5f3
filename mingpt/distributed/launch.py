"""Read the environment variables that the launcher set for this process, such as RANK, into one object.

torch is not imported here, so that a wrong setting is reported without waiting for the import.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from mingpt.base.errors import UserError

# Set by mingpt.launch.agent for its workers.
AGENT_PID = "MINGPT_AGENT_PID"  # getppid() is another process if the agent dies before the worker calls it
STATUS_FILE = "MINGPT_STATUS_FILE"
MAX_THREADS = 1024  # the limit of trainer.threads
UNSET = "if no launcher has set these, start by `env -u RANK -u WORLD_SIZE python ...`"
# Launchers that number their processes by these variables, and whose users may set RANK from them.
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID")
AGENT_FOLDER = "mingpt-"  # prefix of the folder that the agent makes for the status file
# Set by launch/elastic/handler.py for its workers; the same on all nodes, also after nodes were lost.
JOB, ROUND = "MINGPT_JOB", "MINGPT_ROUND"
MEMORY_FILE = "MINGPT_MEMORY_FILE"


@dataclass(frozen=True)
class Launch:
    """The environment variables of torchrun or another launcher; the defaults are for plain `python`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None  # None: no process group, no other worker
    master_port: int = 0
    agent_hosts_store: bool = False
    agent_pid: int | None = None  # torchrun's agent, the parent; it starts a new generation on failure
    restart_count: int = 0
    max_restarts: int = 0
    omp_threads: int | None = None
    job: str | None = None  # a random token, if the launcher gives one
    rdzv_round: int | None = None  # number of the job's rendezvous, from 1, if known
    has_known_launcher: bool = False
    slurm_tasks: int = 1  # tasks of the job step that srun started
    status_file: Path | None = None  # rank 0 writes the job's exit code there; see mingpt.launch.agent
    memory_file: Path | None = None  # a worker writes there where the run's snapshots in memory are

    @classmethod
    def from_environment(cls) -> "Launch":
        """Return the Launch that this process's environment variables describe.

        Raises UserError if RANK and WORLD_SIZE are set but MASTER_ADDR or MASTER_PORT is not, if a variable
        should be a number and is not, or if OMP_NUM_THREADS is more than MAX_THREADS.
        """
        env = os.environ

        def number(name: str, default: int = 0) -> int:
            try:
                return int(env.get(name, default))
            except ValueError:
                raise UserError(f"{name} must be a whole number, not {env[name]!r}") from None

        # OpenMP takes spaces and a list, whose first number is for the outermost loops, and ignores the rest.
        threads = env.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
        if threads.isdecimal() and float(threads) > MAX_THREADS:
            raise UserError(
                f"OMP_NUM_THREADS must be at most {MAX_THREADS}, not {threads}: lower or unset it"
            )
        found = cls(
            omp_threads=int(threads) if threads.isdecimal() else None,
            slurm_tasks=number("SLURM_STEP_NUM_TASKS", 1),
        )
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return found
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
        if missing:
            names = " and ".join(missing)
            raise UserError(f"the launcher sets RANK and WORLD_SIZE but not {names}: {UNSET}")
        return replace(
            found,
            rank=number("RANK"),
            world_size=number("WORLD_SIZE"),
            local_rank=number("LOCAL_RANK"),
            local_world_size=number("LOCAL_WORLD_SIZE", 1),
            node_rank=number("GROUP_RANK"),
            master_addr=env["MASTER_ADDR"],
            master_port=number("MASTER_PORT"),
            agent_hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent_pid=number(AGENT_PID, os.getppid()) if "TORCHELASTIC_RUN_ID" in env else None,
            restart_count=number("TORCHELASTIC_RESTART_COUNT"),
            max_restarts=number("TORCHELASTIC_MAX_RESTARTS"),
            job=env.get(JOB),
            rdzv_round=number(ROUND) if ROUND in env else None,
            status_file=Path(env[STATUS_FILE]) if STATUS_FILE in env else None,
            memory_file=Path(env[MEMORY_FILE]) if MEMORY_FILE in env else None,
            has_known_launcher=any(name in env for name in LAUNCHERS),
        )

    @property
    def has_several_nodes(self) -> bool:
        return self.world_size > self.local_world_size

    @property
    def is_distributed(self) -> bool:
        """Whether a launcher started this worker, so that there is a process group, perhaps of one worker."""
        return self.master_addr is not None

    def describe_leftovers(self) -> str:
        """Return a warning, on rank 0, if variables such as RANK were set by no known launcher; else ""."""
        if self.rank > 0 or self.has_known_launcher or not self.is_distributed:
            return ""
        return (
            "RANK, WORLD_SIZE and MASTER_ADDR in the environment make this process a worker of a job of "
            f"{self.world_size}, and trainer.workers is ignored: {UNSET}\n"
        )

    def threads(self, wanted: int) -> int:
        """Return the CPU threads of a worker for `wanted`, the setting trainer.threads.

        For 1, the default, OMP_NUM_THREADS is returned if it is set.
        """
        return self.omp_threads if wanted == 1 and self.omp_threads else wanted

    def has_restarts_left(self) -> bool:
        """Return whether torchrun's agent starts workers again if these fail."""
        return self.agent_pid is not None and self.restart_count < self.max_restarts

    def is_orphan(self) -> bool:
        """Return whether torchrun's agent, this worker's parent process, is gone."""
        return self.agent_pid not in (None, os.getppid())
