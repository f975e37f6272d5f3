"""Who holds a claim: a job, by its agents, as a file spells it."""

import json
import time
import uuid
from dataclasses import dataclass, field

from mingpt.snapshot.process import Process, parse_process


@dataclass(frozen=True)
class Holder:
    """A job that claims: its agents, the first of which it is named after."""

    agents: tuple[Process, ...]
    job: str = ""  # a random token, kept by later generations; empty until the first one claims a place
    since: float = field(default_factory=time.time)  # seconds since 1970
    slurm_job: str | None = None
    slurm_restarts: int = 0
    started: bool = False  # the job has passed the checks of its start
    released: bool = False
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this very claim

    def to_json(self) -> str:
        fields = vars(self) | {"agents": [agent.to_dict() for agent in self.agents]}
        return json.dumps(fields, indent=1) + "\n"

    def is_alive(self) -> bool | None:
        """Whether an agent lives; None if that cannot be seen from this machine."""
        states = [agent.is_alive() for agent in self.agents]
        if True in states:
            return True
        return None if None in states or not states else False

    def shares_agent(self, other: "Holder") -> bool:
        """Whether `other` is an earlier generation of this job: no agent takes part in two at once."""
        return bool({*self.agents} & {*other.agents})

    def is_part_of(self, job: str) -> bool:
        """Whether this is a part of the job with this token, one that the launcher gave."""
        return bool(self.job) and self.job == job

    def succeeds(self, other: "Holder") -> bool:
        """Whether `other` is an earlier generation of this job, or the same job before it was requeued."""
        is_requeued = self.slurm_job is not None and self.slurm_job == other.slurm_job
        return self.shares_agent(other) or (is_requeued and self.slurm_restarts > other.slurm_restarts)

    def sentence(self) -> str:
        """Who it is, and since when."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        agents = [f"process {agent.pid} on host {agent.host}" for agent in self.agents]
        return f"job {self.job[:8]} ({', '.join(agents) or 'an unknown process'}, since {since})"


def parse_holder(content: bytes) -> Holder:
    """The inverse of `to_json`; a holder without agents for anything else."""
    unknown = Holder((), job="unknown", since=0.0, nonce="")
    try:
        fields = json.loads(content)
        agents = tuple(parse_process(agent) for agent in fields["agents"])
        texts = [fields["job"], fields["nonce"]]
        numbers = [fields["since"], fields["slurm_restarts"]]
    except (ValueError, TypeError, KeyError, RecursionError):
        return unknown
    is_sound = all(isinstance(text, str) for text in texts) and None not in agents
    is_sound = is_sound and all(type(number) in (int, float) and 0 <= number < 2**33 for number in numbers)
    if not is_sound:
        return unknown
    slurm_job = fields.get("slurm_job")
    return Holder(
        tuple(agent for agent in agents if agent),
        job=fields["job"],
        since=fields["since"],
        slurm_job=slurm_job if isinstance(slurm_job, str) else None,
        slurm_restarts=int(fields["slurm_restarts"]),
        started=fields.get("started") is True,
        released=fields.get("released") is True,
        nonce=fields["nonce"],
    )
