"""What a failure means for the job. `worker.Worker` turns each of these into an exit code."""


class UserError(ValueError):
    """Something only the user can put right, said in one sentence. Ends the job with exit code 2."""


class ExpectedError(RuntimeError):
    """An error that its one sentence explains: no traceback is printed. Exit code 1; torchrun may restart."""


class PeersMissing(ExpectedError):
    """This generation ends because other workers did not come, or because the next one leaves a node out."""


class StopRequested(Exception):
    """All ranks have agreed to stop before the first step, when there is nothing to save."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"stopped by {reason}")
        self.reason = reason


class NonRetryableError(ExpectedError):
    """A failure that would repeat, raised on all ranks. Ends the job with exit code 1, without restarts."""


class ClaimLost(ExpectedError):
    """The place that this process writes to is no longer its own."""


class SupersededError(ClaimLost, NonRetryableError):
    """Another job has taken over the place that this one writes to. Raised on the rank that writes there."""


class LaterGeneration(ClaimLost):
    """A later generation of this job writes there: this worker was frozen, or cut off from the others."""


class NodeRefused(UserError):
    """This node cannot take part in a job that goes on without it. Raised on all ranks of the node alone."""


class NonFiniteError(NonRetryableError):
    """A loss or a gradient is NaN or infinite; the update is in no snapshot."""


class CorruptSnapshot(Exception):
    """A snapshot whose files are incomplete or fail their checksums; the message says which."""


class UnreadableSnapshot(Exception):
    """A snapshot or a folder of snapshots that cannot be read now and may be valid; the message says why."""


class SaveAborted(Exception):
    """A snapshot cannot be completed because another rank, whose part it needs, is gone."""
