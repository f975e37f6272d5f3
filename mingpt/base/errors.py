"""Exceptions, named by what a failure means for the job. `distributed.Worker` turns them into exit codes.

`meaning_of` says what the errno of a failed file operation means.
"""

import errno
import sys
from collections.abc import Sequence

# {what a failed file operation means: the errnos that mean it}
MEANINGS = {
    "full": "ENOSPC EDQUOT",
    # The disk or its server is away, or busy, and may come back without a change by the user.
    "may pass": (
        "EIO EAGAIN EWOULDBLOCK EBUSY EINTR ENFILE ENOMEM ENOTCONN ESTALE EHOSTDOWN EHOSTUNREACH ENETDOWN "
        "ENETUNREACH ENETRESET ENONET ENOLINK EREMOTEIO EREMCHG ECOMM EPROTO ETIME ENODEV ENXIO ENOMEDIUM"
    ),
    "forbidden": "EACCES EPERM EROFS",
    # The file system has no such operation.
    "cannot": "EINVAL ENOTSUP EOPNOTSUPP ENOSYS ENOTTY EBADF",
}


def meaning_of(error: BaseException | None) -> str:
    """Return what the error of a failed file operation means: "full", "may pass", "forbidden" or "cannot".

    "cannot" means that the file system has no such operation. A timeout or a lost connection "may pass".
    Returns "" for any other error, such as a missing file, and for None.
    """
    if isinstance(error, (TimeoutError, ConnectionError)):
        return "may pass"
    name = errno.errorcode.get(getattr(error, "errno", None) or 0, "")
    return next((meaning for meaning, names in MEANINGS.items() if name in names.split()), "")


class UserError(ValueError):
    """A mistake that only the user can correct; the message is one sentence.

    The process exits with code 2, and the job ends without restarts. Once the workers of a run have met, all
    ranks raise UserError. But only ranks of refused nodes raise the subclass NodeRefused, and leave the job.

    `may_pass` says whether the cause may pass, as a full disk or a network drive that is away. By default it
    is true if an error of that kind was being handled when this error was constructed. In a restarted worker,
    a UserError that may pass instead leads to exit code 1 and a further restart, while restarts are left.
    """

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.may_pass = meaning_of(sys.exc_info()[1]) in ("full", "may pass")


class ExpectedError(RuntimeError):
    """An error that a worker reports without a traceback. The exit code is 1; a restart may follow."""


class PeersMissing(ExpectedError):
    """The job lacks the workers `ranks`: they did not reach the rendezvous, do not answer, or leave the job.

    After a restart the job may go on without them.
    """

    def __init__(self, sentence: str, ranks: Sequence[int]) -> None:
        super().__init__(sentence)
        self.ranks = ranks


class NodesLeave(PeersMissing):
    """The workers `ranks` raise NodeRefused and leave the job; the others raise NodesLeave, to restart."""


class StopRequested(Exception):
    """All ranks agreed to stop, because of the request `reason`, such as "SIGUSR1".

    Ranks raise this exception only before `SignalListener.defer` is called. Training calls `defer` before its
    first step, when there is nothing to save. A later stop raises nothing: `Trainer.run` returns the request.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that a restart would repeat. It ends the job with exit code 1, without restarts.

    In training all ranks raise this error, but perhaps only some ranks raise its subclass SupersededError.
    """


class ClaimLost(ExpectedError):
    """The claim (the right to write) to the folder of this worker's run or Checkpoint object is lost."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over this job's folder, or this job's claim to the folder was removed.

    In training, a rank that does not write to the run folder raises this only if the state is sharded.
    """


class LaterGeneration(ClaimLost):
    """Restarted workers of this job took over its folder while this worker was frozen or unreachable."""


class NodeRefused(UserError):
    """This node cannot take part in the job, which may go on without this node.

    Only the ranks on refused nodes raise this error.
    """


class NonFiniteError(NonRetryableError):
    """A step's loss or gradient is NaN or infinite. No snapshot contains the update of this step."""


class CorruptSnapshot(Exception):
    """A snapshot must not be used; the message says why.

    The snapshot is incomplete, damaged or ill-formed, or a worker may have computed its content wrongly.
    """


class UnreadableSnapshot(Exception):
    """A snapshot or its folder cannot be read now, or a snapshot belongs to a different job.

    The snapshot may still be valid.
    """
