"""What the launcher says, in its environment and about the generation before: who this worker is, and how it refuses to go on.

The only reader of the launcher's environment. torch is not imported here: a wrong setting is answered without waiting for it.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from mingpt.config import TrainerConfig, UserError

POLL_S = 0.05
GAVE_UP = "gave up a peer that was silent"


class Told(RuntimeError):
    """An error that its one sentence explains: no traceback is printed."""


class EndOfJob(Told):
    """A failure that would repeat: no further generation may start. Raised on all workers alike."""


@dataclass(frozen=True)
class Launch:
    """What the launcher said: nothing under plain `python`, torchrun's variables otherwise."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = 0
    master: tuple[str, int] | None = None  # None: no process group, no other worker
    agent_hosts_store: bool = False
    agent: int | None = None  # process id of torchrun's agent, our parent, which starts a new generation if we fail
    restarts: int = 0
    restarts_allowed: int = 0
    omp_threads: int | None = None

    @classmethod
    def from_environment(cls) -> "Launch":
        env = os.environ
        threads = int(env["OMP_NUM_THREADS"]) if env.get("OMP_NUM_THREADS", "").isdecimal() else None
        if "RANK" not in env or "WORLD_SIZE" not in env:
            return cls(omp_threads=threads)
        return cls(
            int(env["RANK"]),
            int(env["WORLD_SIZE"]),
            int(env.get("LOCAL_RANK", 0)),
            int(env.get("LOCAL_WORLD_SIZE", 1)),
            int(env.get("GROUP_RANK", 0)),
            (env["MASTER_ADDR"], int(env["MASTER_PORT"])),
            env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            os.getppid() if "TORCHELASTIC_RUN_ID" in env else None,
            int(env.get("TORCHELASTIC_RESTART_COUNT", 0)),
            int(env.get("TORCHELASTIC_MAX_RESTARTS", 0)),
            threads,
        )

    def threads(self, config: TrainerConfig) -> int:
        """CPU threads for this worker: the setting, or OMP_NUM_THREADS where the setting stands at its default."""
        return self.omp_threads if config.threads == 1 and self.omp_threads else config.threads

    def another_chance(self) -> bool:
        """Whether the agent starts a next generation if this one fails."""
        return self.agent is not None and self.restarts < self.restarts_allowed

    def refuse(self, error: UserError | EndOfJob, told: Callable[[], bool]) -> NoReturn:
        """Say it, once, and end the job, however many restarts are left: exit code 2 after a UserError, 1 otherwise. All workers call it.

        `told` says whether this worker has heard the agent's SIGTERM already.
        """
        code = 2 if isinstance(error, UserError) else 1
        if self.agent and self.local_rank:
            # The first worker of the node tells the agent, after rank 0 has spoken. Leaving before would have it stopped in mid-sentence.
            signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
            signal.set_wakeup_fd(-1)  # from here on a signal ends this process with our exit code
            while not told():  # it may have come before, while this worker was still on its way here
                time.sleep(POLL_S)
            os._exit(code)
        signal.set_wakeup_fd(-1)
        if self.rank == 0:
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        if self.agent:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the agent passes it on to its workers
            os.kill(self.agent, signal.SIGTERM)
        os._exit(code)


@dataclass(frozen=True)
class Departure:
    """How the generation before this one ended, as far as its store tells."""

    world_size: int
    words: dict[int, dict[str, Any]]  # rank -> {"why": ..., "step": ...}

    def vanished(self) -> list[int]:
        """Ranks that left no word: killed, or cut off."""
        return [rank for rank in range(self.world_size) if rank not in self.words]

    def step(self) -> int | None:
        """The step that the generation had completed."""
        return max((word["step"] for word in self.words.values()), default=None)

    def sentence(self) -> str:
        failed = {rank: word["why"] for rank, word in self.words.items() if word["why"].startswith("failed")}
        if gone := self.vanished():
            silence = next((word["why"].removeprefix(GAVE_UP) for word in self.words.values() if word["why"].startswith(GAVE_UP)), None)
            who = ("worker " if len(gone) == 1 else "workers ") + ", ".join(map(str, gone))
            return f"{who} vanished" if silence is None else f"{who} kept silent{silence}"
        if failed:
            return "; ".join(f"worker {rank} {why}" for rank, why in failed.items())
        return "; ".join(sorted({f"the workers were {word['why']}" for word in self.words.values()}))
