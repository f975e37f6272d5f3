"""The newest valid snapshot that any worker can see, on disk or in a node's memory, and what is corrupt."""

import logging
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mingpt.config import Config
from mingpt.distributed import DistributedContext
from mingpt.errors import UnreadableSnapshot, UserError
from mingpt.run_folder import RunFolder, refuse_where_it_fails
from mingpt.snapshot import Check, Entries, MemorySnapshots, Snapshot, SnapshotStore
from mingpt.snapshot.tensors import DTYPES
from mingpt.stored_state import Rows, StoredState
from mingpt.weights import check_model

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreView:
    """What one rank sees in the store."""

    step: int = -1  # of the newest valid snapshot; -1 for none
    corrupt: dict[int, str] = field(default_factory=dict)  # newer ones: step -> reason
    unreadable: dict[int, str] = field(default_factory=dict)  # newer ones: step -> reason
    folder_error: str | None = None  # why the folder cannot be read
    completed_step: int = 0  # the newest with a manifest, valid or not; 0 for none
    set_aside_step: int = 0  # the newest that was set aside with its manifest; 0 for none

    @property
    def newest(self) -> int:
        """The newest step that is there, valid or not; -1 for none."""
        return max([self.step, *self.corrupt, *self.unreadable])


@dataclass(frozen=True)
class LatestSnapshot:
    """The newest valid snapshot that any rank can see, and what this rank found to be corrupt."""

    snapshot: StoredState | None
    durable_step: int  # of the newest one that is not in memory only
    corrupt: dict[int, str]  # step -> reason
    where: str
    views: list[StoreView]  # by rank


def find_latest(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    is_restart: bool,
    check: Check = check_model,
) -> LatestSnapshot:
    """Find the newest valid snapshot and hand it to all ranks. One worker per node reads the store.

    In a job's first generation, one in memory counts only if no snapshot on disk before it is missing: a user
    who deletes snapshots wants to go back. In a restart, they may have been lost with their node.
    """
    reads_store = context.launch.local_rank == 0
    found, view = context.run_with_heartbeat(
        lambda: view_store(store, check) if reads_store else (None, StoreView())
    )
    views = context.all_gather_object(view)
    saved_after = None if is_restart else max(0, *(view.newest for view in views))
    in_memory = context.run_with_heartbeat(
        lambda: memory.find_newest(view.step, saved_after, check) if reads_store else None
    )
    found = in_memory or found
    durable_step = max(0, *(view.step for view in views))
    unreadable = {step for view in views for step in view.unreadable}  # their files are left as they are
    corrupt = {step: reason for step, reason in view.corrupt.items() if step not in unreadable}
    steps = context.all_gather_object(found.manifest["step"] if found else -1)
    if max(steps) < 0:
        return LatestSnapshot(None, durable_step, corrupt, store.url, views)
    source = steps.index(max(steps))
    found = found if context.rank == source else None
    found_manifest, found_entries = context.broadcast_object(
        (found.manifest, dict(found.entries)) if found else None, source
    )
    stored = make_stored(found_manifest, found_entries, source, found)
    manifest = found_manifest
    where = store.url if manifest["step"] == durable_step else str(memory.root)
    return LatestSnapshot(stored, durable_step, corrupt, where, views)


def make_stored(
    manifest: dict[str, Any], entries: Entries, source: int, snapshot: Snapshot | None
) -> StoredState:
    """One that the rank `source` reads from `snapshot`."""

    def read(name: str, begin: int, end: int) -> Tensor:
        assert snapshot is not None
        return snapshot.read(name, begin, end) if entries[name].shape else snapshot.read(name)

    shapes = {name: entry.shape for name, entry in entries.items()}
    dtypes = {name: DTYPES[entry.dtype] for name, entry in entries.items()}
    rows = [Rows(name, 0, shape[0] if shape else 1, source) for name, shape in shapes.items()]
    return StoredState(manifest, shapes, dtypes, rows, read)


def view_store(store: SnapshotStore, check: Check) -> tuple[Snapshot | None, StoreView]:
    """The newest valid snapshot that this rank can read, and what it sees."""
    try:
        found, corrupt = store.find_newest(check)
        step = found.manifest["step"] if found else -1
        return found, StoreView(step, corrupt, store.unreadable, None, *store.completed_steps())
    except UnreadableSnapshot as error:
        return None, StoreView(folder_error=str(error))


def report_skipped(latest: LatestSnapshot, url: str, config: Config) -> None:
    """A line for each snapshot that is passed over and keeps its name."""
    corrupt = latest.corrupt if config.trainer.eval_only else {}  # a run that trains sets them aside
    unreadable = {step: reason for view in latest.views for step, reason in view.unreadable.items()}
    for step, reason in sorted((corrupt | unreadable).items(), reverse=True):
        log.warning("snapshot of step %d in %s skipped: %s", step, url, reason)
    for reason in sorted({view.folder_error for view in latest.views if view.folder_error}):
        log.warning("%s", reason)


def prepare_store(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    latest: LatestSnapshot,
    is_restart: bool,
    folder: RunFolder,
) -> None:
    """Quarantine corrupt snapshots and prepare the folder. Raises UserError if it cannot be written to."""

    def prepare() -> None:
        for step, reason in latest.corrupt.items():
            quarantine(store, step, reason)
        if context.launch.local_rank == 0:
            memory.remove_leftovers()
        if not is_restart and context.launch.local_rank == 0:
            memory.remove_newer(latest.snapshot.manifest["step"] if latest.snapshot else -1)
        if folder.keeps_snapshots:
            store.prepare()

    refuse_where_it_fails(context, prepare)


def quarantine(store: SnapshotStore, step: int, reason: str) -> None:
    """Set a corrupt snapshot aside. Raises UserError if that fails."""
    try:
        store.quarantine(step, reason)
    except Exception as error:  # each driver raises exceptions of its own
        raise UserError(
            f"the corrupt snapshot of step {step} in {store.url} ({reason}) cannot be renamed: "
            f"{type(error).__name__}: {error}"
        ) from None
