"""The newest valid snapshot that any worker can see, on disk or in a node's memory, and what is corrupt."""

import logging
from dataclasses import dataclass, field
from typing import Any

from mingpt.config import Config
from mingpt.distributed import DistributedContext
from mingpt.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.memory_search import Choice, assemble, find_in_memory
from mingpt.run_folder import RunFolder, refuse_where_it_fails
from mingpt.snapshot import Check, Entries, MemorySnapshots, Snapshot, SnapshotStore
from mingpt.stored_state import StoredState
from mingpt.weights import check_shard

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
    check: Check = check_shard,
) -> LatestSnapshot:
    """Find the newest valid snapshot, for all ranks. One worker per node reads the store and its memory.

    In a job's first generation, one in memory counts only if no snapshot on disk before it is missing: a user
    who deletes snapshots wants to go back. In a restart, they may have been lost with their node.
    """
    reads_store = context.launch.local_rank == 0
    found, view = context.run_with_heartbeat(
        lambda: view_store(store, check) if reads_store else (None, StoreView())
    )
    views = context.all_gather_object(view)
    saved_after = None if is_restart else max(0, *(view.newest for view in views))
    durable_step = max(0, *(view.step for view in views))
    unreadable = {step for view in views for step in view.unreadable}  # their files are left as they are
    corrupt = {step: reason for step, reason in view.corrupt.items() if step not in unreadable}
    steps = [view.step for view in views]
    in_memory = find_in_memory(memory, context, max(steps), saved_after, check)
    if in_memory:
        return LatestSnapshot(in_memory, durable_step, corrupt, str(memory.root), views)
    if max(steps) < 0:
        return LatestSnapshot(None, durable_step, corrupt, store.url, views)
    source = steps.index(max(steps))
    stored = assemble([found] if found else [], Choice([(source, 0)], whole=(source, 0)), context)
    return LatestSnapshot(stored, durable_step, corrupt, store.url, views)


def view_store(store: SnapshotStore, check: Check) -> tuple[Snapshot | None, StoreView]:
    """The newest valid snapshot that this rank can read, and what it sees. A part of a state is none."""

    def check_whole(manifest: dict[str, Any], entries: Entries) -> None:
        if manifest.get("shard"):
            raise CorruptSnapshot("it is a part of a sharded state")
        check(manifest, entries)

    try:
        found, corrupt = store.find_newest(check_whole)
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
