"""Exceptions, named by what a failure means for the job. `distributed.Worker` turns them into exit codes."""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake that only the user can correct; the message is one sentence.

    The process exits with code 2, and a job ends without restarts. In a job all ranks raise it, except for
    the subclass NodeRefused.
    """


class ExpectedError(RuntimeError):
    """An error reported in one sentence, without a traceback. The exit code is 1; a restart may follow."""


class PeersMissing(ExpectedError):
    """Other workers did not reach the rendezvous, or raised NodeRefused. A restart may go on without them."""

    def __init__(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = ranks  # that are missing at the rendezvous


class StopRequested(Exception):
    """All ranks agreed to stop before the first step after a start or restart. There is nothing to save."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that a restart would repeat. It ends the job with exit code 1, without restarts.

    In training all ranks raise it, but the subclass SupersededError is raised only on ranks that write.
    """


class ClaimLost(ExpectedError):
    """This process no longer holds the claim (a job's right to write) to its run folder."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over the run folder, or the claim was removed. Only ranks that write raise it."""


class LaterGeneration(ClaimLost):
    """Restarted workers of this job took over the run folder while this worker was frozen or cut off."""


class NodeRefused(UserError):
    """This node cannot take part in the job, which continues without it. Only this node's ranks raise it."""


class NonFiniteError(NonRetryableError):
    """A loss or a gradient is NaN or infinite. No snapshot contains the update that it led to."""


class CorruptSnapshot(Exception):
    """A snapshot that must not be used: incomplete, damaged, ill-formed or suspect; the message says why."""


class UnreadableSnapshot(Exception):
    """A snapshot, or folder of snapshots, that cannot be read now or is another job's, but may be valid."""
