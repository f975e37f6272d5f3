"""Claims let only one job at a time write to a place: a run folder, or the folder or URL of its snapshots.

A job claims a place by creating `claim-<number>.json` there, with the number after the newest one: if several
jobs try, one succeeds. (At a URL whose driver cannot create a file only if it is new, two may; one ends at
its next write.) The newest claim counts. Another job is refused the place until the claim is released,
or the holder's agents (torchrun's) are seen to have ended. If these agents may be on another machine, the
other job takes over after it has seen no renewal for LEASE_S, the lease. A later generation of the same job,
which shares an agent with the one before, takes over at once. If a job falls into parts that do not reach
each other, the part that claims the place first goes on.

The rank that writes to a place holds the job's claim to it. Before each record and each manifest it asks
`Claim.check` whether the place is still its own.
"""

import contextlib
import functools
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import pydantic

from mingpt.base.errors import ClaimLost, LaterGeneration, SupersededError, UserError
from mingpt.base.files import BadJson, DriverError, check_json, parse_json
from mingpt.base.paths import describe_obstacle
from mingpt.config import Config
from mingpt.distributed import DistributedContext, write_stderr
from mingpt.snapshot import Process, SnapshotStore, this_process
from mingpt.snapshot.store import NO_ROOM
from mingpt.training.run_folder import RunFolder, refuse_where_it_fails

LEASE_S = 20.0  # another job takes over a claim that has not been renewed for so long
RENEW_S = 5.0  # between two renewals
RECHECK_S = 0.5  # between two checks of the claim to a run folder, except before records
POLL_S = 0.5
FILE_NAME = re.compile(r"claim-([0-9]{6,})\.json")
# The drivers of these schemes create an object only if it is absent. With others the last writer wins.
CONDITIONAL_CREATE = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory"}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A job that holds, or asks for, the claim to a place; and its agents (without torchrun, its workers)."""

    agents: tuple[Process, ...]
    job: str = field(default_factory=lambda: uuid.uuid4().hex)  # later generations keep the first one's
    # When the job made its first claim, in seconds since 1970.
    since: Annotated[float, pydantic.Field(strict=True, ge=0, lt=2**33)] = field(default_factory=time.time)
    started: pydantic.StrictBool = False  # the job has passed the checks of its start
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # each renewal draws another one

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    def is_alive(self) -> bool | None:
        """Whether an agent is alive; None if none is seen alive but some cannot be seen, or none is known."""
        states = [agent.is_alive() for agent in self.agents]
        if True in states:
            return True
        return None if None in states or not states else False

    def shares_agent(self, other: "Holder") -> bool:
        """Whether the two holders have an agent in common: then they are one job, as an agent has one job."""
        return bool({*self.agents} & {*other.agents})

    def sentence(self) -> str:
        """Return the job, its agents and since when it holds the claim (local time), for a message."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        agents = [f"process {agent.pid} on host {agent.host}" for agent in self.agents]
        return f"job {self.job[:8]} ({', '.join(agents) or 'an unknown process'}, since {since})"


def parse_holder(content: bytes) -> Holder:
    """Return the holder that `to_json` wrote; for any other content, an unknown holder without agents."""
    try:
        return check_json(parse_json(content), Holder)
    except BadJson:
        return Holder((), job="unknown", since=0.0, nonce="")


class Claim:
    """The claim of this job to the folder or URL `url`, which `what` names in messages.

    After `acquire` the claim is this rank's own, and renewed in the background until `release`. A claim that
    is made with a `number` and a `holder` is another rank's, which this rank only watches by `check`.
    """

    def __init__(
        self, url: str, what: str, lease_s: float = LEASE_S, number: int = 0, holder: Holder | None = None
    ) -> None:
        self.store, self.what, self.lease_s = SnapshotStore(url), what, lease_s
        self.number, self.holder = number, holder  # of the job's claim; 0 and None without one
        self.is_watched = number > 0
        self.was_started = False  # whether an earlier generation of this job has passed its checks
        self.lock = threading.Lock()  # held while the claim is renewed, marked or released
        self.released = threading.Event()
        self.is_held, self.checked_at = True, float("-inf")

    def path(self, number: int) -> str:
        return self.store.path(f"claim-{number:06d}.json")

    def read_newest(self) -> tuple[int, Holder | None]:
        """Return the number and holder of the newest claim of any job; 0 and None if there is no claim.

        Raises OSError, or any other error of the fsspec driver of the place.
        """
        for number in self.numbers():
            try:
                return number, parse_holder(bytes(self.store.files.cat_file(self.path(number))))
            except FileNotFoundError:
                continue  # a newer claim has just replaced it
        return 0, None

    def numbers(self) -> list[int]:
        """Return the numbers of all claims to the place, newest first. Raises errors of the fsspec driver."""
        matches = (FILE_NAME.fullmatch(name) for name in self.store.names())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def check(self) -> None:
        """Raise ClaimLost if the claim was removed, or another job or a later generation has the place.

        Raises nothing before `acquire`, after `release`, or while the place cannot be read. For a claim that
        is only watched, an older claim, or none, raises nothing either: this rank's listing may be late.
        """
        if self.holder is None:
            return  # the claim has been released
        try:
            number, other = self.read_newest()
        except DriverError:
            return  # nothing is logged here: logging a line to log.txt calls this first
        is_same_job = other is not None and other.job == self.holder.job
        is_late = self.is_watched and number < self.number
        if is_late or (is_same_job and number == self.number):
            return
        if is_same_job:
            raise LaterGeneration(f"the job goes on without this worker, which writes no more to {self.what}")
        who = "its claim was removed" if other is None else f"{other.sentence()} has taken over"
        raise SupersededError(f"{self.what} no longer belongs to this job, {who}: nothing more is written")

    def holds(self) -> bool:
        """Whether `check` raises nothing."""
        try:
            self.check()
        except ClaimLost:
            return False
        return True

    def may_write(self) -> bool:
        """Whether `check` raised nothing, no more than RECHECK_S ago; always False once it has raised."""
        if self.is_held and time.monotonic() - self.checked_at > RECHECK_S:
            self.is_held, self.checked_at = self.holds(), time.monotonic()
        return self.is_held

    def acquire(self, holder: Holder) -> None:
        """Claim the place for `holder`, and renew the claim in the background from then on.

        Waits for the lease while a holder on another machine, or another part of this job, may be alive.
        Raises UserError, which names the holder, if another job holds the place, or errors of the fsspec
        driver.
        """
        while not self.number:
            newest, other = self.read_newest()
            is_ours = other is not None and holder.shares_agent(other)
            if other is not None and is_ours:
                holder = replace(holder, job=other.job, since=other.since)
                self.was_started = other.started
            elif other is not None:
                has_ended = self.wait_for_end(newest, other, holder.job)
                if not has_ended:
                    continue  # another job may have claimed the place meanwhile
            try:
                self.store.files.makedirs(self.store.root, exist_ok=True)
                self.create(newest + 1, holder)
            except OSError as error:
                if not is_ours or error.errno not in NO_ROOM:
                    raise
                self.number = newest  # no room for another file: keep the claim of the generation before
        self.holder = holder
        threading.Thread(target=self.keep_renewing, daemon=True).start()

    def wait_for_end(self, number: int, other: Holder, job: str) -> bool:
        """Return True once `other`, the holder of claim `number`, has ended or not renewed it for the lease.

        False if the claim is gone. Raises UserError if `other` is of another job than ours, `job`, and is
        alive or the claim changes. If `other` is a part of our job, waits as long as that part renews the
        claim; False if another claim has replaced it.
        """
        is_this_job, is_alive = job == other.job, other.is_alive()
        if is_alive is False:
            return True
        if is_alive and not is_this_job:
            raise self.refusal(number, other)
        line = (
            f"{self.what} is claimed by {other.sentence()}: waiting {self.lease_s:.0f} s for it to be renewed"
        )
        if is_this_job:
            line = f"another part of this job goes on in {self.what}: waiting until it ends or can be reached"
        write_stderr(f"{line}\n")  # to the terminal alone: log.txt belongs to the job that holds the folder
        deadline = time.monotonic() + self.lease_s
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            number_now, now = self.read_newest()
            if now is None or (is_this_job and number_now != number):
                return False
            if now != other and not is_this_job:
                raise self.refusal(number_now, now)
            if now != other:
                other, deadline = now, time.monotonic() + self.lease_s
        return True

    def refusal(self, number: int, other: Holder) -> UserError:
        """Return the error that names `other`, the holder of claim `number`, and the file of that claim."""
        file = f"{self.store.url.rstrip('/')}/{os.path.basename(self.path(number))}"
        return UserError(
            f"{self.what} is in use by {other.sentence()}: wait for its end, choose another one, or if that "
            f"job is gone, remove its claim {file}"
        )

    def create(self, number: int, holder: Holder) -> None:
        """Try to create the claim of this number, which only one job can; if it worked, set `self.number`."""
        try:
            self.write_new(self.path(number), holder.to_json().encode())
        except FileExistsError:
            time.sleep(POLL_S)  # another job was faster
            return
        newest, winner = self.read_newest()
        if newest == number and winner is not None and winner.nonce == holder.nonce:
            self.number = number
            with self.failure_logged("freed of earlier ones"):  # earlier claims no longer count
                for earlier in self.numbers()[1:]:
                    self.remove(earlier)
        elif newest > number:
            self.remove(number)  # the number was free only because newer claims exist: the place is theirs

    def write_new(self, path: str, content: bytes) -> None:
        """Create a file or an object. Raises FileExistsError if there is one already.

        With drivers of other schemes than CONDITIONAL_CREATE, the object is replaced instead. In a folder, no
        file is left after another OSError.
        """
        if not self.store.is_local:
            scheme = self.store.url.partition("://")[0]
            options = {"mode": "create"} if scheme in CONDITIONAL_CREATE else {}
            self.store.files.pipe_file(path, content, **options)
            return
        with open(path, "xb") as file:
            try:
                file.write(content)
                file.flush()
            except OSError:
                os.unlink(path)
                raise

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.files.rm_file(self.path(number))

    def keep_renewing(self) -> None:
        """Renew the claim every RENEW_S seconds, until it is released."""
        while not self.released.wait(RENEW_S):
            self.renew()

    def renew(self, started: bool = False) -> None:
        """Change the content of the claim, if it is still ours, to show other machines that the job is alive.

        With `started`, the claim tells later generations that the job has passed the checks of its start.
        Needs no room on the disk. A failure is only logged.
        """
        with self.lock, self.failure_logged("renewed"):
            if self.holder is not None and self.holds():
                started = started or self.holder.started
                self.holder = replace(self.holder, started=started, nonce=uuid.uuid4().hex)
                self.rewrite(self.holder)

    def rewrite(self, holder: Holder) -> None:
        """Replace the claim's content in place: a file is never empty, and a full disk does not matter."""
        content = holder.to_json().encode()
        if self.store.is_local:
            with open(self.path(self.number), "r+b") as file:
                file.write(content)
                file.truncate()
        else:
            self.store.files.pipe_file(self.path(self.number), content)

    def release(self) -> None:
        """Remove the claim, if it is still ours, at the end of the job. A failure is only logged."""
        self.released.set()
        with self.lock, self.failure_logged("released"):
            if self.holder is not None and self.holds():
                self.remove(self.number)
            self.holder = None

    @contextlib.contextmanager
    def failure_logged(self, what: str) -> Iterator[None]:
        """Log an error of the block, and do not raise it: at worst the next job waits for the lease.

        `what` is a participle that ends the line "the claim could not be ...", such as "renewed".
        """
        try:
            yield
        except DriverError as error:
            log.info(f"the claim to {self.what} could not be {what}: {error}")


@dataclass(frozen=True)
class Claims:
    """The claims of a job that concern this rank: those that it holds, and one that another rank holds.

    The first of `held` is to the run folder, if this rank writes the records there. `watched` has the claim
    to a place of snapshots that all ranks see, if another rank holds it.
    """

    held: Sequence[Claim]
    watched: Sequence[Claim]

    @property
    def run_dir(self) -> Claim:
        """The claim to the run folder. Only for a rank that writes the records there (RunFolder.is_kept)."""
        return self.held[0]

    def check(self) -> None:
        """Raise ClaimLost if a place no longer belongs to this generation; see `Claim.check`."""
        for claim in (*self.held, *self.watched):
            claim.check()

    def was_started(self) -> bool:
        """Whether an earlier generation of this job has passed its checks, as far as `held` claims tell."""
        return any(claim.was_started for claim in self.held)

    def mark_started(self) -> None:
        for claim in self.held:
            claim.renew(started=True)


def claim_places(config: Config, context: DistributedContext, folder: RunFolder) -> Claims:
    """Claim the places that this rank writes to, until the job ends. Collective.

    Waits as `Claim.acquire` does. Raises the errors of `refuse_where_it_fails` if another job holds a place,
    or a place cannot be written to; before that UserError, on this rank alone, as `places_of` does.
    """
    launch = context.launch
    agents = context.all_gather_object(this_process(launch.agent_pid))
    holder = Holder(tuple(dict.fromkeys(agents)), job=launch.job or uuid.uuid4().hex)
    places: list[Claim] = []
    context.exit.on_job_end(functools.partial(release_all, places))
    places += places_of(config, folder)  # raises UserError for a URL without a driver
    refuse_where_it_fails(context, lambda: acquire_all(places, holder))
    return Claims(places, watch_snapshots(config, context, folder, places))


def places_of(config: Config, folder: RunFolder) -> list[Claim]:
    """Return the claims, not yet acquired, to the places that this rank writes to, the run folder first.

    `snapshot.path` has a claim of its own if it is another place than the run folder, and not in this
    process's memory. Raises UserError for a URL whose driver is not installed.
    """
    claims = [Claim(config.run_dir, f"run_dir {config.run_dir}")] if folder.is_kept else []
    if config.snapshot.path is not None and folder.keeps_snapshots:
        snapshots = Claim(config.snapshot.path, f"snapshot.path {config.snapshot.path}")
        roots = {os.path.realpath(claim.store.root) for claim in (*claims, snapshots)}
        is_elsewhere = len(roots) > len(claims) or not snapshots.store.is_local
        if is_elsewhere and not snapshots.store.is_process_private:
            claims.append(snapshots)
    return claims


def acquire_all(claims: Sequence[Claim], holder: Holder) -> None:
    """Acquire all claims in turn, waiting for leases; those acquired before an error stay held.

    Raises UserError if another job holds a place, or if a place cannot be written to.
    """
    for claim in claims:
        try:
            claim.acquire(holder)
        except UserError:
            raise
        except DriverError as error:
            raise UserError(
                f"{claim.what} cannot be written to: {describe_obstacle(claim.store.url, error)}"
            ) from None


def release_all(claims: Sequence[Claim]) -> None:
    """Release the claims at the end of a job."""
    for claim in claims:
        claim.release()


def watch_snapshots(
    config: Config, context: DistributedContext, folder: RunFolder, held: Sequence[Claim]
) -> list[Claim]:
    """Return the claim that this rank watches: to a place of snapshots that all ranks see. Collective.

    The list is empty on the rank that holds that claim, and if ranks see different folders of snapshots.
    """
    last = [(claim.number, claim.holder) for claim in held[-1:]]  # places_of puts the snapshots' claim last
    last = context.broadcast_object(last, folder.snapshots_rank)
    if context.rank == folder.snapshots_rank or not folder.snapshots_are_shared:
        return []
    path = config.snapshot.path
    what = f"run_dir {config.run_dir}" if path is None else f"snapshot.path {path}"
    return [Claim(path or config.run_dir, what, number=number, holder=holder) for number, holder in last]
