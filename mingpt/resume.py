"""What a generation starts from: found, agreed by all ranks, checked against the configuration, loaded."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mingpt.config import Config, check_workers, differences, to_dict
from mingpt.data import Corpus
from mingpt.distributed import DistributedContext
from mingpt.errors import UnreadableSnapshot, UserError
from mingpt.report import read_run_id
from mingpt.snapshot import MemorySnapshots, Snapshot, SnapshotStore, this_process
from mingpt.weights import check_model, snapshot_tokenizer

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

    snapshot: Snapshot | None
    durable_step: int  # of the newest one that is not in memory only
    corrupt: dict[int, str]  # step -> reason
    where: str
    views: list[StoreView]  # by rank


@dataclass(frozen=True)
class StartPoint:
    """What this generation starts from, the same on all ranks."""

    run_id: str
    is_restart: bool  # false in a job's first generation
    store: SnapshotStore
    memory: MemorySnapshots
    snapshot: Snapshot | None
    durable_step: int
    changes: list[str]  # settings that differ from the snapshot's on purpose

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """Records that the snapshot holds because metrics.jsonl could not be written."""
        return self.snapshot.manifest.get("unwritten", []) if self.snapshot else []


def find_start(config: Config, context: DistributedContext, run_dir: Path, corpus: Corpus) -> StartPoint:
    """Find the newest snapshot and check that the run can go on from it. Raises UserError. Collective."""
    store = context.raise_on_all_ranks(lambda: open_store(config, context))
    is_restart = context.is_restart()
    if not is_restart:
        check_workers(config, context.world_size)
    run_ids = context.all_gather_object(read_run_id(run_dir))
    known_ids = [run_id for run_id in run_ids if run_id]
    run_id = known_ids[0] if known_ids else context.new_run_id()
    agent = this_process(context.launch.agent_pid)
    memory = MemorySnapshots(config.snapshot.memory_path, run_id, run_dir, context.launch.node_rank, agent)
    latest = find_latest(store, memory, context, is_restart)
    if latest.snapshot is None:
        check_nothing_is_lost(latest, config, is_restart)
    if context.rank == 0:
        report_skipped(latest, store.url, config)
    changes = check_snapshot(latest.snapshot, config, latest.where, corpus, is_restart)
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, latest, is_restart)
    return StartPoint(run_id, is_restart, store, memory, latest.snapshot, latest.durable_step, changes)


def open_store(config: Config, context: DistributedContext) -> SnapshotStore:
    """The snapshots of this run. Raises UserError if they could not bring back a worker that died."""
    store = SnapshotStore(config.snapshot.path or str(Path(config.run_dir) / "snapshots"))
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def find_latest(
    store: SnapshotStore, memory: MemorySnapshots, context: DistributedContext, is_restart: bool
) -> LatestSnapshot:
    """Find the newest valid snapshot and hand it to all ranks. One worker per node reads the store.

    In a job's first generation, one in memory counts only if no snapshot on disk before it is missing: a user
    who deletes snapshots wants to go back. In a restart, they may have been lost with their node.
    """
    reads_store = context.launch.local_rank == 0
    found, view = context.run_with_heartbeat(
        lambda: view_store(store) if reads_store else (None, StoreView())
    )
    views = context.all_gather_object(view)
    saved_after = None if is_restart else max(0, *(view.newest for view in views))
    in_memory = context.run_with_heartbeat(
        lambda: memory.find_newest(view.step, saved_after, check_model) if reads_store else None
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
    manifest = context.broadcast_object(found.manifest if found else None, source)
    content = context.broadcast_bytes(found.content if found else None, source)
    where = store.url if manifest["step"] == durable_step else str(memory.root)
    return LatestSnapshot(Snapshot(manifest, content), durable_step, corrupt, where, views)


def view_store(store: SnapshotStore) -> tuple[Snapshot | None, StoreView]:
    """The newest valid snapshot that this rank can read, and what it sees."""
    try:
        found, corrupt = store.find_newest(check_model)
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


def check_nothing_is_lost(latest: LatestSnapshot, config: Config, is_restart: bool) -> None:
    """Raises UserError if the run has, or may have, completed a snapshot past step 0. None is valid now."""
    errors = [view.folder_error for view in latest.views if view.folder_error]
    errors += [f"step {step}: {why}" for view in latest.views for step, why in view.unreadable.items()]
    if errors:
        raise UserError(
            f"the snapshots in {latest.where} cannot be read ({shorten(errors)}): start again when they can "
            "be, or choose another run_dir"
        )
    completed = max(view.completed_step for view in latest.views)
    set_aside = max(view.set_aside_step for view in latest.views)
    # What a job that was told to begin anew finds set aside may be older than the job.
    begins_anew = config.snapshot.resume == "never" and (not is_restart or completed == 0)
    if max(completed, set_aside) == 0 or begins_anew or config.trainer.eval_only:
        return
    reasons = [f"step {step}: {why}" for view in latest.views for step, why in view.corrupt.items()]
    if set_aside:
        reasons.append(f"damaged-*-step_{set_aside:08d}.json was set aside")
    raise UserError(
        f"no valid snapshot is left in {latest.where} ({shorten(reasons)}), where one of step "
        f"{max(completed, set_aside)} was written: choose another run_dir, or begin anew by "
        "snapshot.resume=never"
    )


def shorten(reasons: list[str]) -> str:
    """The first three, in one line."""
    more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
    return "; ".join([*dict.fromkeys(reasons[:3]), *more])


def prepare_store(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    latest: LatestSnapshot,
    is_restart: bool,
) -> None:
    """Quarantine corrupt snapshots and prepare the folder. Raises UserError if it cannot be written to."""

    def prepare() -> None:
        for step, reason in latest.corrupt.items():
            quarantine(store, step, reason)
        if context.launch.local_rank == 0:
            memory.remove_leftovers()
        if not is_restart and context.launch.local_rank == 0:
            memory.remove_newer(latest.snapshot.manifest["step"] if latest.snapshot else -1)
        if context.rank == 0:
            store.prepare()

    context.run_with_heartbeat(prepare)


def quarantine(store: SnapshotStore, step: int, reason: str) -> None:
    """Set a corrupt snapshot aside. Raises UserError if that fails."""
    try:
        store.quarantine(step, reason)
    except Exception as error:  # each driver raises exceptions of its own
        raise UserError(
            f"the corrupt snapshot of step {step} in {store.url} ({reason}) cannot be renamed: "
            f"{type(error).__name__}: {error}"
        ) from None


def check_snapshot(
    snapshot: Snapshot | None, config: Config, url: str, corpus: Corpus, is_restart: bool
) -> list[str]:
    """Raises UserError unless a generation may start from this snapshot; a restart checks the data alone.

    Returns the settings that were changed on purpose.
    """
    resume = config.snapshot.resume
    if snapshot is None:
        if resume == "must" and not is_restart:
            raise UserError(
                f"there is no valid snapshot in {url} to resume from, and snapshot.resume=must needs one"
            )
        if config.trainer.eval_only:
            raise UserError(f"there is no valid snapshot in {url} to evaluate")
        return []
    manifest = snapshot.manifest
    step = manifest["step"]
    if resume == "never" and not is_restart:
        raise UserError(
            f"{url} holds a snapshot of step {step}, and snapshot.resume=never refuses one: "
            "choose another run_dir"
        )
    trained_on = manifest["data"]["sha256"]
    if trained_on != corpus.fingerprint:
        raise UserError(
            f"{config.data.path} (sha256 {corpus.fingerprint[:12]}...) is not the text that the snapshots in "
            f"{url} were trained on ({trained_on[:12]}...): choose another run_dir, with snapshot.init_from "
            "to keep the weights"
        )
    if snapshot_tokenizer(snapshot).fingerprint() != corpus.tokenizer.fingerprint():
        raise UserError(f"{url} holds snapshots of a run with another tokenizer: choose another run_dir")
    if is_restart:
        return []
    changes = differences(manifest["config"], to_dict(config))
    if config.snapshot.init_from and any(change.startswith("snapshot.init_from:") for change in changes):
        raise UserError(
            f"snapshot.init_from starts a fresh run and {url} holds a snapshot of step {step}: "
            "choose another run_dir"
        )
    if changes and resume != "changed":
        raise UserError(
            f"{url} holds snapshots of a run with other settings ({'; '.join(changes)}): set them back, "
            "choose another run_dir, or go on with the new ones by snapshot.resume=changed"
        )
    return changes


def check_environment(start: StartPoint, config: Config, environment: dict[str, Any]) -> None:
    """Raises UserError if the snapshot was computed on another kind of device or in another dtype.

    A person who starts a job may ask for that by snapshot.resume=changed; a restart never does.
    """
    assert start.snapshot
    then = start.snapshot.manifest["software"]
    was = {device_type_of(then), then["dtype"]}
    now = {environment["device_type"], environment["dtype"]}
    is_asked_for = config.snapshot.resume == "changed" and not start.is_restart
    if was == now or is_asked_for or config.trainer.eval_only:
        return
    raise UserError(
        f"the snapshots in {start.store.url} were computed on {device_type_of(then)} in {then['dtype']} and "
        f"the workers now have {environment['device_type']} and {environment['dtype']}: start the job on "
        "such hardware again, or go on with this one by snapshot.resume=changed"
    )


def device_type_of(software: dict[str, Any]) -> str:
    """The kind of device that a snapshot was computed on."""
    kind = software["device"].split()[0]  # schema 1 began without device_type
    return str(software.get("device_type") or (kind if kind in ("cpu", "mps") else "cuda"))


def compare_environment(then: dict[str, Any], now: dict[str, Any]) -> None:
    """One line on what besides the configuration could change the bits."""
    changed = [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]
    if changed:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written "
            "with other software or hardware (%s)",
            "; ".join(changed),
        )
