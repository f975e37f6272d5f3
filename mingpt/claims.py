"""The claims of this job to its run folders and its snapshots, so that no other job writes there.

The rank that writes to a place holds the claim to it for the whole job; see snapshot/claim.py.
"""

import logging
import os
import threading
import time
from dataclasses import replace

from mingpt.config import Config
from mingpt.distributed import DistributedContext, write_stderr
from mingpt.errors import ClaimLost, UserError
from mingpt.run_folder import RunFolder, refuse_where_it_fails
from mingpt.snapshot import Claim, Holder, this_process
from mingpt.snapshot.claim import RENEW_S

RECHECK_S = 0.5
log = logging.getLogger(__name__)


class WatchedClaim:
    """The claim that another rank of this job has acquired, with that number, as this rank sees it."""

    def __init__(self, claim: Claim, number: int, holder: Holder) -> None:
        self.claim, self.number, self.holder = claim, number, holder

    def check(self) -> None:
        """As Claim.check, but on another machine a listing may be late: only a newer claim is a loss."""
        try:
            number, other, _ = self.claim.read_newest()
        except Exception as error:  # each driver raises exceptions of its own
            log.info("the claim to %s cannot be read (%s): going on", self.claim.what, error)
            return
        is_replaced = other is not None and number == self.number and other.job != self.holder.job
        if number > self.number or is_replaced:
            raise self.claim.loss(other, self.holder)


class Claims:
    """The claims that this rank holds for its job, if any; renewed in the background until `release`.

    The first is to the run folder. `watched` are those of other ranks to places that this one writes to, too.
    """

    def __init__(self, claims: list[Claim]) -> None:
        self.claims = claims
        self.watched: list[WatchedClaim] = []
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
        """Raises ClaimLost if a place is another job's by now, or a later generation's."""
        for claim in self.claims:
            claim.check()
        for watched in self.watched:
            watched.check()

    def check_run_dir(self) -> None:
        """`check` for the run folder alone: a record does not wait for an object store."""
        for claim in self.claims[:1]:
            claim.check()

    def may_write(self) -> bool:
        """Whether the run folder was this job's less than RECHECK_S ago: the process may have been frozen."""
        if self.is_held and time.monotonic() - self.checked_at > RECHECK_S:
            try:
                self.check_run_dir()
            except ClaimLost:
                self.is_held = False
            self.checked_at = time.monotonic()
        return self.is_held

    def was_started(self) -> bool:
        """Whether an earlier generation of this job had passed its checks, as far as the places tell."""
        return any(claim.was_started for claim in self.claims)

    def mark_started(self) -> None:
        """Tell later generations that the job has passed the checks of its start."""
        for claim in self.claims:
            try:
                claim.mark_started()
            except Exception as error:  # each driver raises exceptions of its own; the store tells it too
                log.info("the claim to %s could not be marked: %s", claim.what, error)

    def release(self) -> None:
        """The job ends here."""
        self.released.set()
        for claim in self.claims:
            try:
                claim.release()
            except Exception as error:  # each driver raises exceptions of its own
                log.info("the claim to %s could not be released: %s", claim.what, error)
        self.claims = []


def claim_places(config: Config, context: DistributedContext, folder: RunFolder) -> Claims:
    """Claim what this rank is going to write to. Collective; raises UserError if another job holds it."""
    launch = context.launch
    agents = context.all_gather_object(this_process(launch.agent_pid))
    holder = Holder(
        tuple(dict.fromkeys(agents)),
        job=launch.job or "",
        slurm_job=launch.slurm_job,
        slurm_restarts=launch.slurm_restarts,
    )
    places = places_of(config, folder)
    claims = refuse_where_it_fails(context, lambda: acquire_all(places, holder))
    context.exit.release_claims = claims.release
    claims.watched = watch_snapshots(config, context, folder, claims)
    return claims


def watch_snapshots(
    config: Config, context: DistributedContext, folder: RunFolder, claims: Claims
) -> list[WatchedClaim]:
    """The claim to a folder of snapshots that all ranks see, on those that do not hold it. Collective."""
    path = config.snapshot.path
    last = [(claim.number, claim.holder) for claim in claims.claims[-1:]]  # places_of: the snapshots'
    last = context.broadcast_object(last, folder.snapshots_rank)
    is_holder = context.rank == folder.snapshots_rank
    if is_holder or not folder.snapshots_are_shared:
        return []
    what = f"run_dir {config.run_dir}" if path is None else f"snapshot.path {path}"
    place = Claim(path or config.run_dir, what)
    if place.store.is_process_private:
        return []
    return [WatchedClaim(place, number, holder) for number, holder in last if holder is not None]


def places_of(config: Config, folder: RunFolder) -> list[Claim]:
    """The run folder, and `snapshot.path` where that is somewhere else and not this process's memory."""
    claims = [Claim(config.run_dir, f"run_dir {config.run_dir}")] if folder.is_kept else []
    if config.snapshot.path is not None and folder.keeps_snapshots:
        snapshots = Claim(config.snapshot.path, f"snapshot.path {config.snapshot.path}")
        roots = {os.path.realpath(claim.store.root) for claim in (*claims, snapshots)}
        is_elsewhere = len(roots) > len(claims) or not snapshots.store.is_local
        if is_elsewhere and not snapshots.store.is_process_private:
            claims.append(snapshots)
    return claims


def acquire_all(places: list[Claim], holder: Holder) -> Claims:
    """All or none. Raises UserError."""
    claims = Claims(places)  # the first is renewed while the second waits
    for claim in places:
        try:
            claim.acquire(holder, on_wait=write_line)
            if claim.holder is not None:
                holder = replace(holder, job=claim.holder.job)
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
