"""The claims of this job to its run folder and its snapshots, so that no other job writes there.

Rank 0 holds them for the whole job; see snapshot/claim.py.
"""

import logging
import os
import threading
import time

from mingpt.config import Config
from mingpt.distributed import DistributedContext, write_stderr
from mingpt.errors import SupersededError, UserError
from mingpt.snapshot import Claim, Holder, this_process
from mingpt.snapshot.claim import RENEW_S

RECHECK_S = 0.5
log = logging.getLogger(__name__)


class Claims:
    """The claims of this job, none on ranks other than 0; renewed in the background until `release`.

    The first is to the run folder.
    """

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.released = threading.Event()
        self.is_held, self.checked_at = True, float("-inf")
        for claim in claims:
            threading.Thread(target=self.renew, args=(claim,), daemon=True).start()

    def renew(self, claim: Claim) -> None:
        is_failing = False
        while not self.released.wait(RENEW_S):
            try:
                claim.renew()
                is_failing = False
            except Exception as error:  # each driver raises exceptions of its own; `check` decides
                if not is_failing:
                    log.warning("the claim to %s cannot be renewed: %s", claim.what, error)
                is_failing = True

    def check(self) -> None:
        """Raises SupersededError if another job has taken over one of the places."""
        for claim in self.claims:
            claim.check()

    def check_run_dir(self) -> None:
        """`check` for the run folder alone: a record does not wait for an object store."""
        for claim in self.claims[:1]:
            claim.check()

    def may_write(self) -> bool:
        """Whether the run folder was this job's less than RECHECK_S ago: the process may have been frozen."""
        if self.is_held and time.monotonic() - self.checked_at > RECHECK_S:
            try:
                self.check_run_dir()
            except SupersededError:
                self.is_held = False
            self.checked_at = time.monotonic()
        return self.is_held

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
    if config.snapshot.path is not None:
        snapshots = Claim(config.snapshot.path, f"snapshot.path {config.snapshot.path}")
        roots = {os.path.realpath(claim.store.root) for claim in (*claims, snapshots)}
        is_elsewhere = len(roots) == 2 or not snapshots.store.is_local
        if is_elsewhere and not snapshots.store.is_process_private:
            claims.append(snapshots)
    return claims


def acquire_all(places: list[Claim], holder: Holder) -> Claims:
    """All or none. Raises UserError."""
    claims = Claims(places)  # the first is renewed while the second waits
    for claim in places:
        try:
            claim.acquire(holder, on_wait=write_line)
        except UserError:
            claims.release()
            raise
        except Exception as error:  # each driver raises exceptions of its own
            claims.release()
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"{claim.what} cannot be written to: {reason}") from None
    return claims


def write_line(line: str) -> None:
    """To the terminal alone: log.txt belongs to the job that holds the folder."""
    write_stderr(f"{line}\n")
