"""Writes snapshots in the background, one at a time, and prunes old ones."""

import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from mingpt import events
from mingpt.errors import ClaimLost, CorruptSnapshot, SaveAborted, UnreadableSnapshot, UserError
from mingpt.snapshot.layout import PART_BYTES, FileLayout, make_layout, specs_of
from mingpt.snapshot.manifest import FileRecord
from mingpt.snapshot.staging import LocalChunks, StagingBuffer
from mingpt.snapshot.store import NO_ROOM, SnapshotStore

log = logging.getLogger(__name__)

# Manifest fields that are computed in the background; may raise SaveAborted.
LateFields = Callable[[], dict[str, Any]]


class Transfer(Protocol):
    """Brings the tensor files of a snapshot into the store, once or, where there was no room, again."""

    def write_files(self, store: SnapshotStore, step: int) -> list[FileRecord]:
        """In the background thread. Returns the files as the manifest lists them, all of them durable."""


class LocalTransfer:
    """The transfer of a process that holds all tensors, in `staging`."""

    def __init__(self, layouts: Sequence[FileLayout], staging: StagingBuffer) -> None:
        self.layouts, self.staging = layouts, staging

    def write_files(self, store: SnapshotStore, step: int) -> list[FileRecord]:
        return [store.write_file(layout, LocalChunks(layout, self.staging)) for layout in self.layouts]


class SnapshotSaver:
    """A write that fails is reported and training goes on; the last one must succeed, see `finish`.

    Where there is no room for a snapshot, older ones are removed for it, but not the newest that is valid.
    """

    def __init__(
        self, store: SnapshotStore, keep_last: int, keep_best: bool, part_bytes: int = PART_BYTES
    ) -> None:
        self.store, self.keep_last, self.keep_best = store, keep_last, keep_best
        self.part_bytes = part_bytes  # of the largest file, unless a tensor is larger
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
        layouts = make_layout(specs_of(tensors), manifest["step"], self.part_bytes)
        self.start(manifest, LocalTransfer(layouts, staging), late_fields)

    def start(self, manifest: dict[str, Any], transfer: Transfer, late_fields: LateFields = dict) -> None:
        """Begin to write what `transfer` brings; waits for the write before."""
        self.wait()
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, late_fields))
        self.thread.start()

    def write(self, manifest: dict[str, Any], transfer: Transfer, late_fields: LateFields = dict) -> None:
        """What the background thread does."""
        step = manifest["step"]
        events.emit("write_start", kind="disk", step=step)
        try:
            self.write_making_room(manifest | late_fields(), transfer)
            self.error, self.newest_written = None, step
        except (SaveAborted, ClaimLost) as error:
            self.error = error
            return  # the main thread loses the same peer, or the same claim, and reports it
        except Exception as error:  # whatever the driver raises: training goes on, the failure is reported
            self.error = error
            log.warning("snapshot of step %d could not be written: %s: %s", step, type(error).__name__, error)
            return
        try:
            self.prune()
        except Exception as error:  # the new snapshot is valid all the same
            log.warning("old snapshots could not be removed: %s: %s", type(error).__name__, error)
        events.emit("write_end", kind="disk", step=step)

    def write_making_room(self, manifest: dict[str, Any], transfer: Transfer) -> None:
        """Write a snapshot; while there is no room for it, remove an older one and try again."""
        is_written = False
        while not is_written:
            try:
                write_snapshot(self.store, manifest, transfer)
                is_written = True
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                removed = self.remove_one_before(manifest["step"])
                if removed is None:
                    raise
                log.warning(
                    "snapshot of step %d is removed: there was no room for that of step %d",
                    removed,
                    manifest["step"],
                )

    def remove_one_before(self, step: int) -> int | None:
        """Remove the oldest snapshot, the best one last, and keep the newest valid one; returns its step."""
        older = [one for one in self.store.steps() if one < step and one not in self.store.unreadable]
        newest_valid = next((one for one in older if self.is_valid(one)), None)
        if newest_valid is None:
            return None
        best = self.find_best(older)
        removable = [one for one in reversed(older) if one < newest_valid and one != best]
        if best is not None and best < newest_valid:
            removable.append(best)
        if not removable:
            return None
        self.store.remove(removable[0])
        return removable[0]

    def is_valid(self, step: int) -> bool:
        try:
            self.store.read(step)
        except (CorruptSnapshot, UnreadableSnapshot, UserError) as error:
            log.warning("snapshot of step %d is not valid: %s", step, error)
            return False
        return True

    def find_best(self, steps: list[int]) -> int | None:
        """The step with the lowest validation loss, if the best snapshot is to be kept."""
        unreadable = self.store.unreadable
        for step in steps:
            if step not in self.losses and step not in unreadable:
                try:
                    self.losses[step] = validation_loss(self.store.read_manifest(step))
                except CorruptSnapshot:
                    self.losses[step] = None
                except (UnreadableSnapshot, UserError) as error:  # perhaps that of a later version
                    unreadable[step] = str(error)
        self.losses = {step: self.losses[step] for step in steps if step in self.losses}
        known = {step: loss for step, loss in self.losses.items() if loss is not None}
        return min(known, key=known.__getitem__, default=None) if self.keep_best else None

    def prune(self) -> None:
        """Delete all but the newest `keep_last` and the best; those that could not be read do not count."""
        best = self.find_best(self.store.steps())
        steps = [step for step in self.store.steps() if step not in self.store.unreadable]
        for step in steps[self.keep_last :]:
            if step != best:
                self.store.remove(step)
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """What removals that were cut short, and uploads of processes that were killed, have left."""
        complete = self.store.steps()
        for step in self.store.steps("safetensors"):
            if step < max(complete, default=0) and step not in complete:
                has_manifest = self.store.has_manifest(step)  # a listing may be late
                if not has_manifest:
                    self.store.remove(step)
        self.store.abort_unfinished_uploads()

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


def write_snapshot(store: SnapshotStore, manifest: dict[str, Any], transfer: Transfer) -> None:
    """Write a whole snapshot; durable on return. Nothing of it is left if that fails."""
    step = manifest["step"]
    try:
        store.begin(step)
        records = transfer.write_files(store, step)
        store.commit(manifest, records)
    except ClaimLost:
        raise
    except Exception:
        store.discard(step)
        raise


def validation_loss(manifest: dict[str, Any]) -> float | None:
    """The validation loss measured at the snapshot's own step."""
    record = manifest["metrics"].get("val", {})
    return record.get("val/loss") if record.get("step") == manifest["step"] else None
