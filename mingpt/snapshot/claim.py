"""A claim is a file by which a job keeps other jobs from writing to its run folder and the run's snapshots.

The file `claim-<number>.json` is in the run folder, and the claim with the highest number counts. A job takes
the folder over from another job by creating the file with the next number; if several jobs try, only one
succeeds. The new job takes the folder over at once if the claim was released, or if the new job sees that all
agents (torchrun, or train.py) in the claim have ended. If the new job sees one of these agents alive, the new
job is refused with an error. Otherwise, for example if these agents are on a different machine, the new job
waits. The new job is then refused if the claim is renewed, and takes the folder over if LEASE_S seconds pass
without a renewal.

A generation is a job's workers between two restarts. A later generation of the same job overwrites the claim
at once if the two generations have an agent in common. Under anynode, the network may split a job into two
groups of workers that cannot reach each other. Then the group that claims the folder first goes on; the other
group waits while the claim is renewed.

The rank that writes the records of a run folder holds the job's claim to that folder. This rank calls
`Claim.check` before it writes a record, and before a file of a snapshot on disk gets its final name or is
uploaded to a URL. In the same way, rank 0 of a Checkpoint holds the claim to the Checkpoint's local folder.
"""

import json
import os
import re
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mingpt.base.errors import ClaimLost, LaterGeneration, SupersededError, UserError
from mingpt.base.files import (
    BadJson,
    Seconds,
    check_json,
    parse_json,
    reason_of,
    remove_quietly,
    warn_once,
    write_atomic,
)
from mingpt.base.processes import Process
from mingpt.distributed import write_stderr

LEASE_S = 20.0  # another job takes over a claim that has not been renewed for this long
RENEW_S = 5.0  # seconds between two renewals
POLL_S = 0.5
FILE_NAME = re.compile(r"claim-([1-9][0-9]*|0[0-9]{5})\.json")
MAX_BYTES = 4 << 20  # of a claim's file; an agent takes a few hundred


@dataclass(frozen=True)
class Holder:
    """The holder of a claim: one generation, which means a job's workers between two restarts.

    `agents` are processes that started workers of the generation (torchrun, or train.py). For a worker
    without an agent, `agents` has the worker itself.
    """

    agents: tuple[Process, ...]
    job: str  # a random id, the same in all generations of a job
    generation: str  # a random id, different in each generation
    since: Seconds  # time of the job's first claim, in seconds since 1970

    def is_alive(self) -> bool | None:
        """Return True if any of the agents is alive, False if all have ended, None if neither is known.

        Neither is known if no agent is recorded, or if an agent cannot be seen and no other is seen alive.
        """
        states = [agent.is_alive() for agent in self.agents]
        if True in states:
            return True
        return None if None in states or not states else False

    def shares_agent(self, other: "Holder") -> bool:
        """Return whether this holder and `other` have an agent in common."""
        return bool({*self.agents} & {*other.agents})

    def sentence(self) -> str:
        """Return a phrase with the first 8 characters of `job`, the agents, and `since` in local time."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        agents = [f"process {agent.pid} on host {agent.host}" for agent in self.agents]
        return f"job {self.job[:8]} ({', '.join(agents) or 'an unknown process'}, since {since})"


class Found(NamedTuple):
    """A claim as it was read from its file."""

    number: int  # in the file's name; 0 if there is no file
    holder: Holder
    renewed: int  # modification time of the file, in nanoseconds since 1970

    @property
    def is_free(self) -> bool:
        """Whether the folder has no claim, or the claim was released by its job."""
        return not self.number or self.holder == RELEASED


UNKNOWN = Holder((), "unknown", "unknown", since=0.0)  # if a claim's file is damaged, or another program's
EMPTY = replace(UNKNOWN, generation="empty")  # if a claim's file is being written
RELEASED = Holder((), "released", "released", since=0.0)  # written in place of a job that has ended
NONE = Found(0, UNKNOWN, 0)  # what `read_newest` returns if there is no claim


def read_newest(folder: Path) -> Found:
    """Return the claim with the highest number in `folder`, made by any job; NONE if there is no claim.

    A file that is removed during the call is left out. The claim's `holder` is EMPTY if the file is empty,
    because it is being written, for example. The holder is UNKNOWN if the file is damaged. Raises OSError if
    the folder or the file exists but cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return NONE
    for name in sorted(filter(FILE_NAME.fullmatch, names), key=number_of, reverse=True):
        try:
            with open(folder / name, "rb") as file:
                content, renewed = file.read(MAX_BYTES), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            continue  # a newer claim has just replaced it
        try:
            holder = check_json(parse_json(content), Holder)
        except BadJson:
            holder = UNKNOWN if content else EMPTY
        return Found(number_of(name), holder, renewed)
    return NONE


def number_of(name: str) -> int:
    return int(name[len("claim-") : -len(".json")])


class Claim:
    """The right of `holder` (a job's workers between two restarts) to write to a folder.

    `acquire` obtains the right, and `release` ends it. In messages, the text `what` stands before the path.
    """

    def __init__(self, folder: Path, holder: Holder, what: str = "run_dir ") -> None:
        self.folder, self.holder, self.what = folder, holder, f"{what}{folder}"
        self.number = 0  # in the name of the claim's file; 0 while this generation does not hold the claim

    def path(self, number: int) -> Path:
        return self.folder / f"claim-{number:06d}.json"

    def check(self) -> None:
        """Raise ClaimLost if the claim was removed, or is now that of another job or another generation.

        Returns without an error before `acquire` has claimed the folder, and after `release`. Also returns if
        the folder or the newest claim cannot be read now, or if that claim's file is empty or damaged.
        """
        if not self.number:
            return
        try:
            found = read_newest(self.folder)
        except OSError:
            return  # nothing is logged here: logging a line to log.txt calls this first
        other = found.holder
        if other.generation == self.holder.generation or (not found.is_free and other.job == UNKNOWN.job):
            return
        what = self.what
        if other.job == self.holder.job:
            raise LaterGeneration(f"the job goes on without this worker, which writes no more to {what}")
        who = "its claim was removed" if found.is_free else f"{other.sentence()} has taken over"
        raise SupersededError(f"{what} no longer belongs to this job, {who}: nothing more is written")

    def may_write(self) -> bool:
        """Return whether this generation may still write to the folder: False if `check` raises ClaimLost."""
        try:
            self.check()
        except ClaimLost:
            return False
        return True

    def acquire(self) -> None:
        """Claim the folder, and from then on renew the claim in a background thread.

        Waits until `may_take` returns True, or until the newest claim has not changed for LEASE_S seconds.
        Raises UserError, which names the other job, if the newest claim is another job's with an agent that
        is seen alive, or if another job makes or renews a claim during the wait. Raises OSError if the folder
        cannot be read or written.
        """
        waited_for, deadline = NONE, 0.0
        while not self.number:
            found = read_newest(self.folder)
            if self.may_take(found) or (found == waited_for and time.monotonic() > deadline):
                self.take(found)
                continue
            if found != waited_for:
                self.refuse_or_tell(found, is_first=not waited_for.number)
                waited_for, deadline = found, time.monotonic() + LEASE_S
            time.sleep(POLL_S)
        threading.Thread(target=self.keep_renewing, daemon=True).start()

    def may_take(self, found: Found) -> bool:
        """Return whether the folder may be claimed at once; `found` is the claim with the highest number.

        Returns True if `found.is_free`, or if all agents of the claim's holder are seen to have ended. Also
        returns True if that holder and this generation have an agent in common.
        """
        holder = found.holder
        return found.is_free or holder.is_alive() is False or self.holder.shares_agent(holder)

    def refuse_or_tell(self, found: Found, is_first: bool) -> None:
        """Raise UserError if another job uses the folder; else print, once per wait, that this job waits.

        `found` is the claim with the highest number, and `is_first` is true in the first call of a wait.
        Another job that holds this claim counts as using the folder if one of its agents is seen alive. After
        the first call such a job counts as using the folder in any case, because the claim has changed.
        """
        holder = found.holder
        if holder.job != self.holder.job and (holder.is_alive() or not is_first):
            raise UserError(
                f"{self.what} is in use by {holder.sentence()}: wait for its end, choose "
                "another folder, or if that job is gone or this folder is a copy, remove its claim "
                f"{self.path(found.number)}"
            )
        if is_first:  # only to the terminal: log.txt belongs to the job that holds the folder
            write_stderr(
                f"{self.what} is claimed by {holder.sentence()}: waiting until it has not "
                f"renewed its claim for {LEASE_S:.0f} s\n"
            )

    def take(self, found: Found) -> None:
        """Try to claim the folder; on success set `number`. `found` is the claim with the highest number.

        If the holder of `found` and this generation have an agent in common, the claim's file is overwritten,
        and `holder` gets the `job` and `since` of that holder. Otherwise a file with the next number is made,
        and the file of `found` is removed, but not if its holder is UNKNOWN: the file may be a user's. If
        another job is faster, `number` stays 0. Raises OSError if the file cannot be written, or the folder
        cannot be read.
        """
        is_ours = self.holder.shares_agent(found.holder)
        if is_ours:
            self.holder = replace(self.holder, job=found.holder.job, since=found.holder.since)
        number = found.number if is_ours else found.number + 1
        try:
            with open(self.path(number), "r+b" if is_ours else "xb") as file:
                file.write(json.dumps(asdict(self.holder), indent=1).encode())
                file.truncate()
        except FileExistsError:
            time.sleep(POLL_S)  # another job was faster
            return
        except OSError:
            if not is_ours:
                remove_quietly(self.path(number))
            raise
        if not is_ours and found.holder != UNKNOWN:
            remove_quietly(self.path(found.number))
        if read_newest(self.folder).number > number:
            remove_quietly(self.path(number))  # the number was free only because there is a newer claim
            return
        self.number = number

    def keep_renewing(self) -> None:
        while self.number:
            time.sleep(RENEW_S)
            self.renew()

    def renew(self) -> None:
        """Let the claim's file have a new modification time, to show other machines that the job is alive.

        Does nothing before `acquire` and after `release`, or if `check` raises ClaimLost. An OSError is only
        logged, once for each reason.
        """
        try:
            if self.number and self.may_write():
                with open(self.path(self.number), "r+b") as file:
                    # Some mounts refuse utime. Every claim begins with this byte, so that the claim stays as
                    # it is even if another process has just written it.
                    file.write(b"{")
        except OSError as error:
            warn_once(
                f"the claim to {self.what} cannot be renewed ({reason_of(error)}): a job on "
                f"another host may take the folder over after {LEASE_S:.0f} s"
            )

    def release(self) -> None:
        """Release the claim, unless `check` raises ClaimLost. Call this when the job ends.

        The claim's file stays, so that the next claim gets the next number: a process that was suspended
        while it tried to take over an earlier claim then finds a newer one. If the file cannot be written, it
        is removed, if possible. Raises no OSError.
        """
        if self.number and self.may_write():
            try:
                write_atomic(self.path(self.number), json.dumps(asdict(RELEASED)), sync="nothing")
            except OSError:
                remove_quietly(self.path(self.number))
        self.number = 0
