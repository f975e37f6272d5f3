"""Exceptions, by what a failure means for the job. `worker.Worker` turns them into exit codes."""


class UserError(ValueError):
    """A mistake that only the user can correct, described in one sentence. Ends the job with exit code 2."""


class ExpectedError(RuntimeError):
    """An error that one sentence explains, without a traceback. Exit code 1; torchrun may restart."""


class PeersMissing(ExpectedError):
    """This generation ends: other workers did not arrive, or other nodes got NodeRefused."""


class StopRequested(Exception):
    """All ranks have agreed to stop before this generation's first step, when there is nothing to save."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that would repeat, raised on all ranks. Ends the job with exit code 1, without restarts."""


class ClaimLost(ExpectedError):
    """This process no longer holds the claim to the run folder or snapshot folder that it writes to."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over the folder that this job writes to. Raised on the rank that writes there."""


class LaterGeneration(ClaimLost):
    """A later generation of this job has taken over the folder: this worker was frozen, or cut off."""


class NodeRefused(UserError):
    """This node cannot take part in the job, which continues without it. Raised on this node's ranks only."""


class NonFiniteError(NonRetryableError):
    """A loss or a gradient is NaN or infinite; no snapshot holds the update."""


class CorruptSnapshot(Exception):
    """A snapshot whose files are incomplete or fail their checksums; the message says which."""


class UnreadableSnapshot(Exception):
    """A snapshot or a folder of snapshots that cannot be read now and may be valid; the message says why."""


class SaveAborted(Exception):
    """A snapshot cannot be completed because another rank, whose part it needs, is gone."""
