"""Exceptions, by what a failure means for the job. `launch.worker.Worker` turns them into exit codes."""


class UserError(ValueError):
    """A mistake that only the user can correct, in one sentence. All ranks raise it; ends the job, code 2."""


class ExpectedError(RuntimeError):
    """An error that one sentence explains, without a traceback. Exit code 1; the agent may restart."""


class PeersMissing(ExpectedError):
    """This generation ends, for the agent to restart: workers did not arrive, or nodes got NodeRefused."""


class StopRequested(Exception):
    """All ranks have agreed to stop, for `reason`, before this generation's first step: nothing to save."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that would repeat, raised on all ranks. Ends the job with exit code 1, without restarts."""


class ClaimLost(ExpectedError):
    """This process no longer holds the claim (a job's right to write) to its run or snapshot folder."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over the folder that this job writes to. Raised on the rank that writes there."""


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


class SaveAborted(Exception):
    """A snapshot cannot be completed because another rank, whose part it needs, is gone."""
