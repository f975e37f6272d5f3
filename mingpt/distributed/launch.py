"""Read the environment variables that the launcher set for this process, such as RANK, into a Launch.

torch is not imported here, so that a wrong setting is reported without waiting for torch's import.
"""

import os
from dataclasses import dataclass, replace

from mingpt.base.errors import UserError

# Set by mingpt.launch.agent for its workers.
# The agent's process id. getppid() would return a wrong one if the agent dies before the worker calls it.
AGENT_PID = "MINGPT_AGENT_PID"
MAX_THREADS = 1024  # the limit of trainer.threads
UNSET = "if no launcher has set these, start by `env -u RANK -u WORLD_SIZE python ...`"
# Variables by which launchers number their processes. Users of these launchers may set RANK from them.
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PALS_RANKID")
# Set by the rendezvous anynode for its workers, with the same values on all nodes; see anynode/__init__.py.
JOB, ROUND, STORE_PORT = "ANYNODE_JOB", "ANYNODE_ROUND", "ANYNODE_STORE_PORT"


@dataclass(frozen=True)
class Launch:
    """What the launcher's environment variables say; the defaults are for plain `python`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    master_addr: str | None = None  # None: no process group, no other worker
    master_port: int = 0  # of a store that outlives a generation, if the launcher has one
    agent_hosts_store: bool = False  # torchrun's agent, not rank 0, hosts the workers' TCPStore
    # The process id of torchrun's agent, the parent, which starts new workers if these fail; None: no agent.
    agent_pid: int | None = None
    restart_count: int = 0
    max_restarts: int = 0
    omp_threads: int | None = None  # OMP_NUM_THREADS; None: not set, or not a number
    job: str | None = None  # the job's random token; None: the launcher gives none
    # The round, from 1: how many times this job's agents have started workers together; None: not known.
    rdzv_round: int | None = None
    has_known_launcher: bool = False  # one of the variables in LAUNCHERS is set
    slurm_tasks: int = 1  # number of tasks in the job step that srun started
    has_own_agent: bool = False  # the agent is that of plain `python`; see mingpt.launch.agent

    @classmethod
    def from_environment(cls) -> "Launch":
        """Return the Launch that this process's environment variables describe.

        If RANK or WORLD_SIZE is not set, only OMP_NUM_THREADS and SLURM_STEP_NUM_TASKS count. Otherwise,
        raises UserError if MASTER_ADDR or MASTER_PORT is missing. Also raises UserError if a numeric
        variable, such as RANK, is not a whole number, or if OMP_NUM_THREADS is more than MAX_THREADS. Of a
        list such as "4,2" in OMP_NUM_THREADS, the first number counts. Any other text there is ignored.
        """
        env = os.environ

        def number(name: str, default: int = 0) -> int:
            try:
                return int(env.get(name, default))
            except ValueError:
                raise UserError(f"{name} must be a whole number, not {env[name]!r}") from None

        # OpenMP accepts spaces, and a list, whose first number is for the outermost loops. A value of any
        # other form is ignored.
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
            master_port=number(STORE_PORT, number("MASTER_PORT")),
            agent_hosts_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            agent_pid=number(AGENT_PID, os.getppid()) if "TORCHELASTIC_RUN_ID" in env else None,
            restart_count=number("TORCHELASTIC_RESTART_COUNT"),
            max_restarts=number("TORCHELASTIC_MAX_RESTARTS"),
            job=env.get(JOB),
            rdzv_round=number(ROUND) if ROUND in env else None,
            has_own_agent=AGENT_PID in env,
            has_known_launcher=any(name in env for name in LAUNCHERS),
        )

    @property
    def has_several_nodes(self) -> bool:
        return self.world_size > self.local_world_size

    @property
    def is_distributed(self) -> bool:
        """Whether RANK and WORLD_SIZE are set. If so, even a single worker has a process group."""
        return self.master_addr is not None

    def describe_leftovers(self) -> str:
        """Return a warning if variables such as RANK are set, but none of a known launcher's (see LAUNCHERS).

        Returns "" if there is nothing to warn about, and on all ranks but 0.
        """
        if self.rank > 0 or self.has_known_launcher or not self.is_distributed:
            return ""
        return (
            "RANK, WORLD_SIZE and MASTER_ADDR in the environment make this process a worker of a job of "
            f"{self.world_size}, and trainer.workers is ignored: {UNSET}\n"
        )

    def threads(self, wanted: int) -> int:
        """Return the number of CPU threads of a worker for `wanted`, the setting trainer.threads.

        If `wanted` is 1, the default, return `omp_threads` instead, unless that is None or 0.
        """
        return self.omp_threads if wanted == 1 and self.omp_threads else wanted

    def has_restarts_left(self) -> bool:
        """Return whether the agent may start new workers if the present workers fail."""
        return self.agent_pid is not None and self.restart_count < self.max_restarts

    def is_orphan(self) -> bool:
        """Return whether torchrun's agent, this worker's parent process, is gone."""
        return self.agent_pid not in (None, os.getppid())
