"""What a generation starts from: found, agreed by all ranks, checked against the configuration, loaded."""

import logging
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingpt.config import Config, check_workers
from mingpt.data import Data
from mingpt.distributed import DistributedContext
from mingpt.errors import UnreadableSnapshot, UserError
from mingpt.handover import agree_on_run_id, share_history
from mingpt.latest import LatestSnapshot, find_latest, prepare_store, report_skipped
from mingpt.report import GenerationStart, read_durable_step, read_job_start
from mingpt.run_folder import RunFolder
from mingpt.settings import differences, to_dict
from mingpt.snapshot import Check, Entries, MemorySnapshots, SnapshotStore, this_process
from mingpt.stored_state import StoredState
from mingpt.weights import check_shard

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartPoint:
    """What this generation starts from, the same on all ranks."""

    run_id: str
    is_restart: bool  # false in a job's first generation
    store: SnapshotStore
    memory: MemorySnapshots
    snapshot: StoredState | None
    durable_step: int
    changes: list[str]  # settings that differ from the snapshot's on purpose
    folder: RunFolder
    own_step: int  # of the newest snapshot on a disk that this rank reads; -1 for none

    @property
    def was_compiled(self) -> bool | None:
        """Whether the model of the snapshot was; None if nothing has been trained yet."""
        if self.snapshot is None or self.snapshot.manifest["step"] == 0:
            return None
        return bool(self.snapshot.manifest["software"].get("compiled"))

    @property
    def unwritten(self) -> list[dict[str, Any]]:
        """Records that the snapshot holds because metrics.jsonl could not be written."""
        return self.snapshot.manifest.get("unwritten", []) if self.snapshot else []


def find_start(
    config: Config, context: DistributedContext, folder: RunFolder, data: Data, was_started: bool
) -> StartPoint:
    """Find the newest snapshot and check that the run can go on from it. Raises UserError. Collective.

    `was_started`: this rank knows that an earlier generation of the job had begun.
    """
    store = context.raise_on_all_ranks(lambda: open_store(config, context))
    is_restart = context.is_restart(was_started)
    if not is_restart:
        check_workers(config, context.world_size)
    run_id = agree_on_run_id(context, folder, was_started)
    agent = this_process(context.launch.agent_pid)
    memory = MemorySnapshots(
        config.snapshot.memory_path, run_id, folder.path, context.launch.node_rank, agent
    )
    starts = context.all_gather_object(read_job_start(folder.path, run_id) if is_restart else None)
    check = make_check(config, data, max((step for step in starts if step is not None), default=None))
    latest = find_latest(store, memory, context, is_restart, check)
    if latest.snapshot is None or latest.snapshot.manifest["step"] == 0:
        durable_steps = context.all_gather_object(read_durable_step(folder.path, run_id))
        check_nothing_is_lost(latest, config, is_restart, max(durable_steps))
    if context.rank == 0:
        report_skipped(latest, store.url, config)
    changes = check_snapshot(latest.snapshot, config, latest.where, data, is_restart)
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, latest, is_restart, folder)
        step = latest.snapshot.manifest["step"] if latest.snapshot else 0
        share_history(context, folder, step)
    return StartPoint(
        run_id,
        is_restart,
        store,
        memory,
        latest.snapshot,
        latest.durable_step,
        changes,
        folder,
        latest.views[context.rank].step,
    )


def make_check(config: Config, data: Data, job_start: int | None) -> Check:
    """What a snapshot must fulfil to be looked at. `job_start`: the step from which this job began.

    In a restart, a node that joins may have newer ones of another run, or of an earlier job of this one.
    """

    def check(manifest: dict[str, Any], entries: Entries) -> None:
        check_shard(manifest, entries)
        if job_start is None or manifest["step"] <= job_start:
            return
        changes = changed_settings(manifest, config)
        if manifest["data"]["sha256"] != data.fingerprint:
            changes.append("data")
        if changes:
            raise UnreadableSnapshot(f"it is none of this job ({'; '.join(changes)})")

    return check


def changed_settings(manifest: dict[str, Any], config: Config) -> list[str]:
    """Those that affect the result and differ from the snapshot's.

    trainer.compile=auto changes nothing: it goes on as the snapshot was computed.
    """
    changes = differences(manifest["config"], to_dict(config))
    if config.trainer.compile != "auto":
        return changes
    return [change for change in changes if not change.startswith("trainer.compile:")]


def describe_start(start: StartPoint, context: DistributedContext) -> GenerationStart:
    """What run.json tells of the beginning of this generation. Collective."""
    hosts = context.all_gather_object((context.launch.node_rank, platform.node()))
    return GenerationStart(
        start.run_id,
        start.snapshot.manifest["step"] if start.snapshot else 0,
        context.world_size,
        start.is_restart,
        [host for _, host in sorted(set(hosts))],
        context.previous_generation,
        start.durable_step,
        start.changes,
        start.unwritten,
        start.was_compiled,
    )


def open_store(config: Config, context: DistributedContext) -> SnapshotStore:
    """The snapshots of this run. Raises UserError if they could not bring back a worker that died."""
    store = SnapshotStore(config.snapshot.path or str(Path(config.run_dir) / "snapshots"))
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def check_nothing_is_lost(
    latest: LatestSnapshot, config: Config, is_restart: bool, recorded_step: int = 0
) -> None:
    """Raises UserError if the run has, or may have, completed a snapshot past step 0. None is valid now.

    `recorded_step`: of the newest snapshot on disk that any run.json tells of.
    """
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
    is_first = not is_restart or max(completed, recorded_step) == 0
    begins_anew = config.snapshot.resume == "never" and is_first
    newest = max(completed, set_aside, recorded_step)
    if newest == 0 or begins_anew or config.trainer.eval_only:
        return
    reasons = [f"step {step}: {why}" for view in latest.views for step, why in view.corrupt.items()]
    if set_aside:
        reasons.append(f"damaged-*-step_{set_aside:08d}.json was set aside")
    if recorded_step > max(completed, set_aside):
        reasons.append(f"run.json tells of one of step {recorded_step}, which no node has")
    raise UserError(
        f"no valid snapshot is left in {latest.where} ({shorten(reasons)}), where one of step "
        f"{newest} was written: choose another run_dir, or begin anew by "
        "snapshot.resume=never"
    )


def shorten(reasons: list[str]) -> str:
    """The first three, in one line."""
    more = [f"and {len(reasons) - 3} more"] if len(reasons) > 3 else []
    return "; ".join([*dict.fromkeys(reasons[:3]), *more])


def check_snapshot(
    snapshot: StoredState | None, config: Config, url: str, data: Data, is_restart: bool
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
    if manifest["data"]["sha256"] != data.fingerprint:
        what = describe_other_data(config.data.path, data, url, manifest["data"])
        raise UserError(f"{what}: choose another run_dir, with snapshot.init_from to keep the weights")
    if is_restart:
        return []
    changes = changed_settings(manifest, config)
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


def describe_other_data(path: str, data: Data, url: str, then: dict[str, Any]) -> str:
    """In which way `data` is not that of the snapshots in `url`, whose manifest says `then` of theirs."""
    was, now = then.get("files", {}), data.files
    if not was or not now:
        return (
            f"{path} (sha256 {data.fingerprint[:12]}...) is not the data that the snapshots in {url} were "
            f"trained on ({then['sha256'][:12]}...)"
        )
    differing = (name for name in [*was, *now] if was.get(name) != now.get(name))
    name = next(differing, None)
    what = f"{name} has changed"
    if name is None:
        what = "the files are the same, and not their order or the split"
    elif name not in now:
        what = f"{name} is missing"
    elif name not in was:
        what = f"{name} is new"
    return f"the snapshots in {url} were trained on other token shards than those in {path}: {what}"


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
    then = {"numerics": 1} | then  # at first it was not recorded
    changed = [f"{name}: {then[name]} -> {now[name]}" for name in then if then[name] != now.get(name)]
    if changed:
        log.info(
            "the bits may differ from those of an undisturbed run, because the snapshot was written "
            "with other software or hardware (%s)",
            "; ".join(changed),
        )
