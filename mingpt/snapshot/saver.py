"""Writes snapshots in the background, one at a time, and prunes old ones."""

import logging
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from mingpt import events
from mingpt.errors import CorruptSnapshot, SaveAborted, UnreadableSnapshot, UserError
from mingpt.snapshot.staging import StagingBuffer
from mingpt.snapshot.store import Content, SnapshotStore

log = logging.getLogger(__name__)

# Manifest fields that are computed in the background; may raise SaveAborted.
LateFields = Callable[[], dict[str, Any]]


class SnapshotSaver:
    """A write that fails is reported and training goes on; the last one must succeed, see `finish`."""

    def __init__(self, store: SnapshotStore, keep_last: int, keep_best: bool) -> None:
        self.store, self.keep_last, self.keep_best = store, keep_last, keep_best
        self.losses: dict[int, float | None] = {}  # validation loss at each step that has a snapshot
        self.staging: StagingBuffer | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.newest_written = 0  # step

    def allocate(self, tensors: Mapping[str, Tensor]) -> StagingBuffer:
        """Allocate the staging buffer for such a state, if that is not done yet."""
        if self.staging is None:
            self.staging = StagingBuffer(tensors)
        return self.staging

    def save(
        self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], late_fields: LateFields = dict
    ) -> None:
        """Copy the tensors and begin to write them; waits for the write before. On return they may change."""
        self.wait()
        staging = self.allocate(tensors)
        staging.fill(tensors)
        self.thread = threading.Thread(target=self.write, args=(manifest, staging.content, late_fields))
        self.thread.start()

    def write(self, manifest: dict[str, Any], content: Content, late_fields: LateFields = dict) -> None:
        """What the background thread does."""
        step = manifest["step"]
        events.emit("write_start", kind="disk", step=step)
        try:
            self.store.write(manifest | late_fields(), content)
            self.error, self.newest_written = None, step
        except SaveAborted as error:
            self.error = error
            return  # the main thread loses the same peer, and reports it
        except Exception as error:  # whatever the driver raises: training goes on, the failure is reported
            self.error = error
            log.warning("snapshot of step %d could not be written: %s: %s", step, type(error).__name__, error)
            return
        try:
            self.prune()
        except Exception as error:  # the new snapshot is valid all the same
            log.warning("old snapshots could not be removed: %s: %s", type(error).__name__, error)
        events.emit("write_end", kind="disk", step=step)

    def prune(self) -> None:
        """Delete all but the newest `keep_last` and the best; those that could not be read do not count."""
        unreadable = self.store.unreadable
        for step in self.store.steps():
            if step not in self.losses and step not in unreadable:
                try:
                    self.losses[step] = validation_loss(self.store.read_manifest(step))
                except CorruptSnapshot:
                    self.losses[step] = None
                except (UnreadableSnapshot, UserError) as error:  # perhaps that of a later version
                    unreadable[step] = str(error)
        steps = [step for step in self.store.steps() if step not in unreadable]
        losses = {step: self.losses.get(step) for step in steps}
        known = {step: loss for step, loss in losses.items() if loss is not None}
        best = min(known, key=known.__getitem__, default=None) if self.keep_best else None
        for step in steps[self.keep_last :]:
            if step != best:
                self.store.remove(step)
        oldest = min(self.store.steps(), default=0)
        for step in self.store.steps("safetensors"):
            if step < oldest:
                self.store.remove(step)  # a removal that was cut short

    def wait(self, timeout_s: float = math.inf) -> bool:
        """Wait for the write under way, at most so long; returns whether it is over."""
        if self.thread:
            self.thread.join(None if timeout_s == math.inf else timeout_s)
        return not (self.thread and self.thread.is_alive())

    def finish(self) -> None:
        """Wait until the last snapshot is durable; raises what kept it from being written."""
        self.wait()
        if self.error:
            raise self.error


def validation_loss(manifest: dict[str, Any]) -> float | None:
    """The validation loss measured at the snapshot's own step."""
    record = manifest["metrics"].get("val", {})
    return record.get("val/loss") if record.get("step") == manifest["step"] else None
