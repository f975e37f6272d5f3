"""Exceptions, by what a failure means for the job. `distributed.worker.Worker` turns them into exit codes."""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake that only the user can correct, in one sentence. Ends the job with exit code 2.

    All ranks raise it, except the subclass NodeRefused.
    """


class ExpectedError(RuntimeError):
    """An error that one sentence explains, without a traceback. Exit code 1; the agent may restart."""


class PeersMissing(ExpectedError):
    """Workers did not reach the rendezvous, or other nodes' ranks raise NodeRefused. A restart may follow."""

    def __init__(self, sentence: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(sentence)
        self.ranks = ranks  # those missing at the rendezvous


class StopRequested(Exception):
    """All ranks agreed to stop before this generation's first step, so that there is nothing to save."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that a restart would repeat. Ends the job with exit code 1, without restarts.

    In training all ranks raise it, except the subclass SupersededError.
    """


class ClaimLost(ExpectedError):
    """This process no longer holds the claim (a job's right to write) to its run folder."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over the folder, or the claim was removed. Raised only where a rank writes."""


class LaterGeneration(ClaimLost):
    """A later generation of this job has taken over the folder: this worker was frozen, or cut off."""


class NodeRefused(UserError):
    """This node cannot take part in the job, which continues without it. Raised on this node's ranks only."""


class NonFiniteError(NonRetryableError):
    """A loss or a gradient is NaN or infinite; no snapshot holds the update."""


class CorruptSnapshot(Exception):
    """A snapshot that must not be used: incomplete, damaged, ill-formed or suspect; the message says why."""


class UnreadableSnapshot(Exception):
    """A snapshot, or folder of snapshots, that cannot be read now or is not this job's, and may be valid."""
