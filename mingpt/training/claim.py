"""One job at a time writes to a place: a run folder, or the folder or URL of its snapshots.

A job claims a place by creating `claim-<number>.json` there, with the number after the newest one: of several
jobs that try, one succeeds. The newest claim counts. It holds until it is released, while one of the job's
agents lives on this machine, or for LEASE_S after it was last renewed. A later generation of the same job,
which shares an agent with the one before, takes over at once, and so does a job that Slurm has requeued.
Where a job falls into parts that do not reach each other, the part that claims the place goes on.
"""

import contextlib
import errno
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated

import pydantic

from mingpt.base.errors import ClaimLost, LaterGeneration, SupersededError, UserError
from mingpt.base.files import BadJson, DriverError, check_json, parse_json
from mingpt.snapshot import Process, SnapshotStore
from mingpt.snapshot.store import NO_ROOM

LEASE_S = 20.0  # after which another job takes over from one that shows no sign of life
RENEW_S = 5.0  # between such signs
SETTLE_S = 2.0  # until all writers of an object have written, where a driver has no conditional create
POLL_S = 0.5
FILE_NAME = re.compile(r"claim-([0-9]{6,})\.json")
# Their drivers create an object only if it is absent; others look first and then write.
CONDITIONAL_CREATE = {"s3", "s3a", "gs", "gcs", "abfs", "az", "memory"}
Time = Annotated[float, pydantic.Field(strict=True, ge=0, lt=2**33)]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A job that claims: its agents, the first of which it is named after."""

    agents: tuple[Process, ...]
    job: str = ""  # a random token, kept by later generations; empty until the first one claims a place
    since: Time = field(default_factory=time.time)  # seconds since 1970
    slurm_job: str | None = None
    slurm_restarts: pydantic.StrictInt = 0
    started: pydantic.StrictBool = False  # the job has passed the checks of its start
    released: pydantic.StrictBool = False
    nonce: str = field(default_factory=lambda: uuid.uuid4().hex)  # of this very claim

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

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
    try:
        return check_json(parse_json(content), Holder)
    except BadJson:
        return Holder((), job="unknown", since=0.0, nonce="")


class Claim:
    """The claim of one job to one place. Construct it, then `acquire`; `what` is the place in a sentence."""

    def __init__(self, url: str, what: str, lease_s: float = LEASE_S) -> None:
        self.store, self.what, self.lease_s = SnapshotStore(url), what, lease_s
        self.number = 0  # of our own claim; 0 for none
        self.holder: Holder | None = None
        self.was_started = False  # by an earlier generation of this job
        self.lock = threading.Lock()  # of renewing and releasing

    def path(self, number: int) -> str:
        return self.store.path(f"claim-{number:06d}.json")

    def numbers(self) -> list[int]:
        """Of all claims there, newest first. Raises OSError, or whatever the driver does."""
        matches = (FILE_NAME.fullmatch(name) for name in self.store.names())
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def read_newest(self) -> tuple[int, Holder | None, object]:
        """Number, holder, and something that changes whenever it is renewed; 0 and None for no claim."""
        for number in self.numbers():
            path = self.path(number)
            try:
                content = bytes(self.store.files.cat_file(path))
                # Reading it first has a network file system ask its server for the time.
                mark = os.stat(path).st_mtime_ns if self.store.is_local else 0
            except FileNotFoundError:
                continue  # a newer claim has just replaced it
            return number, parse_holder(content), (number, content, mark)
        return 0, None, None

    def acquire(self, holder: Holder, on_wait: Callable[[str], None] = lambda line: None) -> None:
        """Claim the place, which takes up to the lease if a holder on another machine may be alive.

        Raises UserError, naming the holder, if another job holds it.
        """
        while not self.number:
            newest, other, mark = self.read_newest()
            is_ours = other is not None and not other.released and holder.succeeds(other)
            if other is not None and not other.released:
                if is_ours:
                    holder = replace(holder, job=holder.job or other.job, since=other.since)
                    self.was_started = other.started and holder.shares_agent(other)
                elif other.is_alive() and not holder.is_part_of(other.job):
                    raise self.refusal(other)
                elif other.is_alive() is not False:
                    has_ended = self.wait_for_lease(newest, other, mark, holder, on_wait)
                    if not has_ended:
                        continue  # it is another's by now, perhaps
            named = replace(holder, job=holder.job or uuid.uuid4().hex)
            try:
                self.store.files.makedirs(self.store.root, exist_ok=True)
                self.create(newest + 1, named)
            except OSError as error:
                if not is_ours or error.errno not in NO_ROOM:
                    raise
                self.number = newest  # no room for another file: the claim of the generation before serves
        self.holder = named

    def refusal(self, other: Holder) -> UserError:
        return UserError(
            f"{self.what} is in use by {other.sentence()}: wait for its end, choose another one, or if that "
            f"job is gone, drop its claim by python -m mingpt doctor --claim {self.store.url} --release"
        )

    def wait_for_lease(
        self,
        number: int,
        other: Holder,
        mark: object,
        holder: Holder,
        on_wait: Callable[[str], None],
    ) -> bool:
        """Whether the lease of a claim ends; False if it is released or changes hands.

        Raises UserError if another job renews it. Another part of this job may renew it again and again.
        """
        is_this_job = holder.is_part_of(other.job)
        left_s = self.lease_s - self.age_s(number)
        if is_this_job:
            on_wait(
                f"another part of this job goes on in {self.what}: waiting until it ends or can be reached"
            )
        elif left_s > 0:
            on_wait(
                f"{self.what} is claimed by {other.sentence()}: waiting {left_s:.0f} s for it to be renewed"
            )
        deadline = time.monotonic() + left_s
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            number_now, now, mark_now = self.read_newest()
            if now is None or now.released or (is_this_job and number_now != number):
                return False
            if mark_now != mark and not is_this_job:
                raise self.refusal(now)
            if mark_now != mark:
                mark, deadline = mark_now, time.monotonic() + self.lease_s
        return True

    def age_s(self, number: int) -> float:
        """Seconds since a claim was renewed by the clock of the file system; 0 where that is not known."""
        if not self.store.is_local:
            return 0.0
        probe = self.store.path(f"claim-probe-{uuid.uuid4().hex}")
        try:
            with open(probe, "xb") as file:
                now = os.fstat(file.fileno()).st_mtime
            os.unlink(probe)
            return max(0.0, now - os.stat(self.path(number)).st_mtime)
        except OSError:
            return 0.0  # no room for another file, or the claim has just been replaced

    def create(self, number: int, holder: Holder) -> None:
        """Try to create the claim with this number, which only one job can."""
        try:
            self.create_file(self.path(number), holder.to_json().encode())
        except FileExistsError:
            time.sleep(POLL_S)  # another job was faster
            return
        newest, winner, _ = self.read_newest()
        if newest == number and winner is not None and winner.nonce == holder.nonce:
            self.number = number
            self.remove_older()
        elif newest > number:
            self.remove(number)  # its number was free only because newer claims exist

    def create_file(self, path: str, content: bytes) -> None:
        """Create a file whole. Raises FileExistsError."""
        if not self.store.is_local:
            self.create_object(path, content)
            return
        temporary = f"{path}.{uuid.uuid4().hex}"
        try:
            with open(temporary, "xb") as file:
                file.write(content)
            try:
                os.link(temporary, path)
            except FileExistsError:
                raise
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                # A file system without links: a reader may see the file before its content.
                with open(path, "xb") as file:
                    file.write(content)
        finally:
            with contextlib.suppress(FileNotFoundError):  # it could not be created
                os.unlink(temporary)

    def create_object(self, path: str, content: bytes) -> None:
        protocols = self.store.files.protocol
        protocols = {protocols} if isinstance(protocols, str) else {*protocols}
        try:
            self.store.files.pipe_file(path, content, mode="create")
        except TypeError:  # a driver older than this mode
            if self.store.files.exists(path):
                raise FileExistsError(path) from None
            self.store.files.pipe_file(path, content)
        if not protocols & CONDITIONAL_CREATE:
            time.sleep(SETTLE_S)  # of simultaneous writers the last one wins

    def remove_older(self) -> None:
        """Claims that no longer count; one that stays does no harm."""
        try:
            for number in self.numbers():
                if number < self.number:
                    self.remove(number)
        except DriverError as error:
            log.info("an earlier claim to %s is left: %s", self.what, error)

    def remove(self, number: int) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.files.rm_file(self.path(number))

    def renew(self) -> None:
        """The job is alive. Needs no room on the disk. Raises OSError, or whatever the driver does."""
        with self.lock:
            if self.holder is None or not self.holds():
                return
            if self.store.is_local:
                os.utime(self.path(self.number))
            else:
                renewed = replace(self.holder, nonce=uuid.uuid4().hex)
                self.store.files.pipe_file(self.path(self.number), renewed.to_json().encode())

    def holds(self) -> bool:
        """Whether the claim that counts is ours. Raises OSError, or whatever the driver does."""
        number, newest, _ = self.read_newest()
        if newest is None or self.holder is None:
            return False
        # A number may come again in a folder that was removed meanwhile.
        return (number, newest.job) == (self.number, self.holder.job)

    def check(self) -> None:
        """Raises SupersededError if another job has taken over, LaterGeneration if this one has."""
        holder = self.holder
        try:
            if self.holds():
                return
            other = self.read_newest()[1]
        except DriverError as error:
            log.info("the claim to %s cannot be read (%s): going on", self.what, error)
            return
        raise self.loss(other, holder)

    def loss(self, other: Holder | None, holder: Holder | None) -> ClaimLost:
        """The error of `check`, where `other` has the place that was `holder`'s."""
        if other is not None and holder is not None and not other.released and other.job == holder.job:
            return LaterGeneration(
                f"the job goes on without this worker, which writes no more to {self.what}"
            )
        who = "its claim was removed" if other is None else f"{other.sentence()} has taken over"
        return SupersededError(f"{self.what} no longer belongs to this job, {who}: nothing more is written")

    def mark_started(self) -> None:
        """The job has passed the checks of its start. Raises OSError, or whatever the driver does."""
        with self.lock:
            if self.holder is not None and not self.holder.started and self.holds():
                self.holder = replace(self.holder, started=True)
                self.rewrite(self.holder)

    def release(self) -> None:
        """The job has ended: the next one need not ask whether it is alive. Needs no room on the disk."""
        with self.lock:
            if self.holder is not None and self.holds():
                self.mark_released(self.holder)
            self.holder = None

    def mark_released(self, holder: Holder) -> None:
        if self.number == 1:
            self.remove(1)  # no earlier holder can take a later claim with this number for its own
            return
        self.rewrite(replace(holder, released=True))

    def rewrite(self, holder: Holder) -> None:
        """Write another content into the claim, in place."""
        content = holder.to_json().encode()
        if self.store.is_local:
            with open(self.path(self.number), "r+b") as file:
                file.write(content)
                file.truncate()
        else:
            self.store.files.pipe_file(self.path(self.number), content)

    def drop(self) -> None:
        """Release whatever claim there is; its holder notices that before it writes again."""
        newest, other, _ = self.read_newest()
        if other is not None and not other.released:
            self.create(newest + 1, replace(other, released=True, nonce=uuid.uuid4().hex))
