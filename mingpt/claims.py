"""The claims of this job to its run folder and its snapshots, so that no other job writes there.

Rank 0 holds them for the whole job; see snapshot/claim.py.
"""

import logging
import threading
from pathlib import Path

from mingpt.config import Config
from mingpt.distributed import DistributedContext, write_stderr
from mingpt.errors import SupersededError, UserError
from mingpt.report import close_log_file
from mingpt.snapshot import Claim, Holder, this_process
from mingpt.snapshot.claim import RENEW_S

log = logging.getLogger(__name__)


class Claims:
    """None or more claims, renewed in the background until `release`."""

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.released = threading.Event()
        if claims:
            threading.Thread(target=self.renew, daemon=True).start()

    def renew(self) -> None:
        while not self.released.wait(RENEW_S):
            for claim in self.claims:
                try:
                    claim.renew()
                except Exception as error:  # each driver raises exceptions of its own; `check` decides
                    log.info("the claim to %s could not be renewed: %s", claim.what, error)

    def check(self) -> None:
        """Raises SupersededError if another job has taken over one of the places."""
        try:
            for claim in self.claims:
                claim.check()
        except SupersededError:
            close_log_file()
            raise

    def release(self) -> None:
        """The job ends here."""
        self.released.set()
        for claim in self.claims:
            try:
                claim.release()
            except Exception as error:  # each driver raises exceptions of its own
                log.info("the claim to %s could not be released: %s", claim.what, error)
        self.claims = []


def claim_places(config: Config, context: DistributedContext) -> Claims:
    """Claim what this job is going to write to. Collective; raises UserError if another job holds it.

    Ranks other than 0 hold no claims.
    """
    launch = context.launch
    agents = context.all_gather_object(this_process(launch.agent_pid))
    holder = Holder(
        tuple(dict.fromkeys(agents)), slurm_job=launch.slurm_job, slurm_restarts=launch.slurm_restarts
    )
    places = places_of(config) if context.rank == 0 and not config.trainer.eval_only else []
    claims = context.run_with_heartbeat(lambda: acquire_all(places, holder))
    context.exit.release_claims = claims.release
    return claims


def places_of(config: Config) -> list[Claim]:
    """The run folder, and `snapshot.path` where that is somewhere else and not this process's memory."""
    claims = [Claim(config.run_dir, f"run_dir {config.run_dir}")]
    url = config.snapshot.path
    if url is None or Path(url).resolve() == Path(config.run_dir).resolve():
        return claims
    snapshots = Claim(url, f"snapshot.path {url}")
    return claims if snapshots.store.is_process_private else [*claims, snapshots]


def acquire_all(claims: list[Claim], holder: Holder) -> Claims:
    """All or none. Raises UserError."""
    held = Claims([])
    try:
        for claim in claims:
            claim.acquire(holder, on_wait=write_line)
            held.claims.append(claim)
    except UserError:
        held.release()
        raise
    except Exception as error:  # each driver raises exceptions of its own
        held.release()
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{claim.what} cannot be written to: {reason}") from None
    return Claims(claims)


def write_line(line: str) -> None:
    """To the terminal alone: log.txt belongs to the job that holds the folder."""
    write_stderr(f"{line}\n")
