"""What is saved when, on disk and in memory, and the fields of the manifest."""

from collections.abc import Callable
from typing import Any

from mingpt import events
from mingpt.audit import Audit
from mingpt.config import Config, to_dict
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext, is_lost_peer
from mingpt.errors import SaveAborted
from mingpt.report import RunLogger
from mingpt.resume import StartPoint
from mingpt.snapshot import SnapshotSaver
from mingpt.state import TrainState


class Saving:
    """The snapshots of this generation. Methods are collective unless they say otherwise.

    Rank 0 writes to disk; the first worker of each node writes to its memory.
    """

    def __init__(
        self,
        config: Config,
        context: DistributedContext,
        state: TrainState,
        start: StartPoint,
        corpus: Corpus,
        environment: dict[str, Any],
        audit: Audit,
    ) -> None:
        self.config, self.context, self.state, self.audit = config, context, state, audit
        self.corpus, self.environment = corpus, environment
        self.memory, self.store = start.memory, start.store
        self.saver = SnapshotSaver(start.store, config.snapshot.keep_last, config.snapshot.keep_best)
        self.last_save_step = start.durable_step  # of the last save to disk that was begun
        self.durable_step = start.durable_step  # of the last one that all ranks know to be on disk

    @property
    def newest_written(self) -> int:
        """Step of the last snapshot that this rank has written to disk; 0 if none. Not collective."""
        return self.saver.newest_written

    def allocate(self) -> None:
        """Allocate staging buffers before the first step, so that no save has to."""
        tensors = self.state.full_state()
        if self.context.rank == 0:
            self.saver.allocate(tensors)
        if self.config.snapshot.memory_every and self.context.launch.local_rank == 0:
            self.memory.allocate(tensors)

    def note_written(self, step: int) -> None:
        """All ranks have learned that the snapshot of this step is on disk."""
        if step > self.durable_step:
            self.durable_step = step
            if self.context.launch.local_rank == 0:
                self.memory.remove_outdated(step)

    def save_to_disk(self, run_logger: RunLogger | None) -> None:
        """Copy the state; rank 0 writes it in the background."""
        events.emit("save_start", kind="disk", step=self.state.step)
        if self.durable_step < self.last_save_step:
            self.wait()
        self.last_save_step = self.state.step
        chain = self.audit.gather_chain(self.context)
        tensors = self.state.full_state()
        if run_logger:
            logger = run_logger
            manifest = self.manifest() | {"metrics": dict(logger.last)}

            def late_fields() -> dict[str, Any]:
                # A step that has a snapshot is never computed again, so its records must be durable.
                logger.flush()
                return audit_fields(chain)

            self.saver.save(manifest, tensors, late_fields)
        events.emit("save_end", kind="disk", step=self.state.step)

    def save_to_memory(self) -> None:
        """Copy the state to memory that outlives this process."""
        events.emit("save_start", kind="memory", step=self.state.step)
        chain = self.audit.gather_chain(self.context)
        tensors = self.state.full_state()
        if self.context.launch.local_rank == 0:
            manifest = self.manifest() | {"metrics": {}, "after": self.durable_step}
            self.memory.save(manifest, tensors, lambda: audit_fields(chain))
        events.emit("save_end", kind="memory", step=self.state.step)

    def manifest(self) -> dict[str, Any]:
        """The fields that are known now; the audit chain and the checksums are added in the background."""
        return {
            "step": self.state.step,
            "windows": self.state.windows_seen,
            "config": to_dict(self.config),
            "vocabulary": self.corpus.tokenizer.to_bytes().decode(),
            "data": {"path": self.config.data.path, "sha256": self.corpus.fingerprint},
            "software": self.environment,
        }

    def wait(self) -> None:
        """Until rank 0's write is over; asks once a second, so that a long upload causes no timeout."""
        done = False
        while not done:
            done = self.context.broadcast_object(self.saver.wait(timeout_s=1.0), 0)

    def finish(self) -> None:
        """Until the last snapshot is on disk. On rank 0, raises what kept it from being written."""
        self.wait()
        if self.context.rank == 0:
            self.saver.finish()

    def remove_memory_snapshots(self) -> None:
        """The run ends here. Not collective."""
        if self.context.launch.local_rank == 0:
            self.memory.remove()


def audit_fields(chain: Callable[[], str]) -> dict[str, str]:
    """The chain for the manifest. Raises SaveAborted if a rank that it needs is gone."""
    try:
        return {"audit": chain()}
    except RuntimeError as error:
        if is_lost_peer(error):
            raise SaveAborted from error
        raise
