"""The start of a generation (the workers between two restarts): one sequence, the same on all ranks.

It opens the run folder, claims it (a claim is one job's right to write there), opens the data, finds the
newest snapshot that any rank sees, checks it against the configuration, reads the weights to start with if
there is no snapshot, and makes the tokens. The result is a StartPoint, from which build.py makes the state.
"""

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.config import Config, check_workers, differences, to_dict
from mingpt.data import Corpus, Data
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import Environment
from mingpt.report import load_history, open_log, read_job_start
from mingpt.snapshot import Check, Entries, MemorySnapshots, SnapshotStore, read_config, this_process
from mingpt.snapshot.manifest import is_suspect
from mingpt.training.audit import START
from mingpt.training.claim import Claims, claim_places
from mingpt.training.initial_weights import InitialWeights, open_weights
from mingpt.training.run_data import first_difference, load_corpus, load_data
from mingpt.training.run_folder import (
    RunFolder,
    agree_on_run_id,
    check_same_settings,
    open_run_folder,
    share_history,
)
from mingpt.training.search import SUSPECT, check_nothing_is_lost, find_latest, prepare_store, report_skipped
from mingpt.training.state import StoredState, check_shapes, check_shard, snapshot_shapes, snapshot_vocab_size

# The settings that can change an evaluation, by the beginnings of their names.
EVALUATED = ("data.", "model.", "trainer.dtype:", "trainer.compile:", "trainer.fsdp_param_dtype:")
NOT_BEGUN: dict[str, Any] = {"step": 0, "windows": 0, "audit": START, "software": {}}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundSnapshot:
    """The snapshot that a generation goes on from, and the places for the next ones.

    The same on all ranks, except `own_step` and what `snapshot`, `store` and `memory` read and write here.
    """

    run_id: str
    is_restart: bool  # false in a job's first generation
    store: SnapshotStore
    memory: MemorySnapshots
    snapshot: StoredState | None  # None in a fresh run
    durable_step: int  # step of the newest valid snapshot on any disk; 0 for none
    own_step: int  # step of the newest valid snapshot that this rank reads from disk; -1 for none
    changes: list[str]  # settings that differ from the snapshot's on purpose
    discarded_after: list[int]  # see is_suspect

    @property
    def manifest(self) -> dict[str, Any]:
        """The snapshot's manifest; without a snapshot, those fields of it that a fresh run uses."""
        return self.snapshot.manifest if self.snapshot else NOT_BEGUN

    @property
    def step(self) -> int:
        """The step of the snapshot; 0 without one."""
        return int(self.manifest["step"])


@dataclass(frozen=True)
class StartPoint(FoundSnapshot):
    """Everything that this generation starts from; `find_start` makes it."""

    folder: RunFolder
    claims: Claims
    corpus: Corpus
    environment: Environment
    initial: InitialWeights | None  # the weights of snapshot.init_from, on rank 0 of a fresh run

    @property
    def was_compiled(self) -> bool | None:
        """Whether the snapshot's model was compiled; None if nothing has been trained yet."""
        return bool(self.manifest["software"].get("compiled")) if self.step else None

    @property
    def logged_step(self) -> int:
        """The newest step, not past the snapshot's, that must have a record of metrics; 0 for none."""
        if self.snapshot is None:
            return 0
        log_every = read_config(self.snapshot.manifest).trainer.log_every
        return self.step // log_every * log_every


def find_start(config: Config, context: DistributedContext) -> StartPoint:
    """Claim and open the run folder, open the data, and find what the run goes on from. Collective.

    Raises UserError, NonRetryableError or, if the job goes on without a node, NodeRefused on that node's
    ranks and PeersMissing on the others. A request to stop raises StopRequested.
    """
    check_same_settings(config, context)
    folder = open_run_folder(config, context)
    claims = claim_places(config, context, folder)
    if folder.is_kept:
        open_log(context.rank, folder.path, claims.run_dir.may_write)
    else:
        open_log(context.rank, None)
    if context.rendezvous and context.rendezvous.missing_workers:
        log.warning(context.rendezvous.missing_workers)
    data = load_data(config, context)
    found = find_snapshot(config, context, folder, claims, data)
    initial, weights = None, config.snapshot.init_from
    if weights and not found.snapshot:
        initial = context.run_with_heartbeat(lambda: open_weights(weights) if context.rank == 0 else None)
    corpus = load_corpus(config, context, data, found.snapshot, found.is_restart, initial)
    environment = choose_environment(config, context, found)
    if context.idle_gpus:
        log.info(context.idle_gpus)
    return StartPoint(
        **vars(found), folder=folder, claims=claims, corpus=corpus, environment=environment, initial=initial
    )


def find_snapshot(
    config: Config, context: DistributedContext, folder: RunFolder, claims: Claims, data: Data
) -> FoundSnapshot:
    """Find the newest snapshot and check that the run can go on from it. Collective.

    Unless the run only evaluates, also prepares the places of snapshots and copies the records to all run
    folders. Raises UserError or, if the job goes on without a node, NodeRefused or PeersMissing.
    """
    store = context.raise_on_all_ranks(lambda: open_store(config, context, claims))
    is_restart = context.is_restart(claims.was_started())
    if not is_restart:
        check_workers(config, context.world_size)
    run_id = agree_on_run_id(context, folder, claims.was_started())
    agent = this_process(context.launch.agent_pid)
    memory = MemorySnapshots(
        config.snapshot.memory_path, run_id, folder.path, context.launch.node_rank, agent
    )
    history = load_history(folder.path, run_id) or {"generations": []}
    starts = context.all_gather_object(read_job_start(history) if is_restart else None)
    suspects = max(context.all_gather_object(history.get("suspects", [])), key=len)
    discarded_after = [entry["after"] for entry in suspects]
    job_start = max((step for step in starts if step is not None), default=None)
    check = make_check(config, data, job_start, discarded_after)
    latest = find_latest(store, memory, context, is_restart, check)
    if latest.snapshot is None or latest.snapshot.manifest["step"] == 0:
        durable_steps = context.all_gather_object(history.get("durable_step", 0))
        check_nothing_is_lost(latest, config, is_restart, max(durable_steps))
    if context.rank == 0:
        report_skipped(latest, store.url, config)
    changes = check_snapshot(latest.snapshot, config, latest.where, data, is_restart)
    found = FoundSnapshot(
        run_id,
        is_restart,
        store,
        memory,
        latest.snapshot,
        latest.durable_step,
        latest.views[context.rank].step,
        changes,
        discarded_after,
    )
    if context.rank == 0 and len(suspects) > len(found.manifest.get("discarded_after", [])):
        workers, after = " or ".join(suspects[-1]["workers"]), suspects[-1]["after"]
        log.warning(f"{workers} computed wrongly: nothing that was saved after step {after} is used")
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, latest, is_restart, folder)
        share_history(context, folder, found.step)
    return found


def open_store(config: Config, context: DistributedContext, claims: Claims) -> SnapshotStore:
    """Return the store of this run's snapshots, which writes nothing once one of `claims` is lost.

    Raises UserError, on this rank alone, for a URL whose driver is not installed or, under a launcher, for a
    memory:// URL.
    """
    url = config.snapshot.path or str(Path(config.run_dir) / "snapshots")
    store = SnapshotStore(url, check_claim=claims.check)
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def make_check(config: Config, data: Data, job_start: int | None, discarded_after: list[int]) -> Check:
    """Return a check that raises CorruptSnapshot or UnreadableSnapshot for a snapshot that must not be used.

    Corrupt are snapshots with wrong tensors (`check_shard`) or past their own max_steps, and suspect ones,
    which workers that computed wrongly may have written: `is_suspect` tells by `discarded_after`. Snapshots
    past `job_start`, the step from which this job began, are unreadable if their settings or data are not
    this job's: a node that joins may bring them, and their files must not be touched. If `job_start` is None
    (in a job's first generation, or not known), settings and data are not compared.
    """

    def check(manifest: dict[str, Any], entries: Entries) -> None:
        check_shard(manifest, entries)
        if manifest["step"] > read_config(manifest).trainer.max_steps:
            raise CorruptSnapshot("its step is past its own trainer.max_steps")
        if is_suspect(manifest, discarded_after):
            raise CorruptSnapshot(SUSPECT)
        if job_start is None or manifest["step"] <= job_start:
            return
        changes = changed_settings(manifest, config)
        if manifest["data"]["sha256"] != data.fingerprint:
            changes.append("data")
        if changes:
            raise UnreadableSnapshot(f"it is none of this job ({'; '.join(changes)})")

    return check


def changed_settings(manifest: dict[str, Any], config: Config) -> list[str]:
    """Return the settings that affect the result and differ from the manifest's, as "key: old -> new".

    trainer.compile=auto never counts as different: the run goes on compiled, or not, as the snapshot was.
    """
    changes = differences(manifest["config"], to_dict(config))
    if config.trainer.compile != "auto":
        return changes
    return [change for change in changes if not change.startswith("trainer.compile:")]


def check_snapshot(
    snapshot: StoredState | None, config: Config, url: str, data: Data, is_restart: bool
) -> list[str]:
    """Raise UserError unless a generation may start from this snapshot, or without one (None).

    In a restart, only the data must be those of the snapshot. Returns the settings that were changed on
    purpose, with snapshot.resume=changed, as "key: old -> new". Messages call the snapshots' place `url`.
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
    if config.trainer.eval_only:
        changes = [change for change in changes if change.startswith(EVALUATED)]
    if changes:
        check_model_fits(snapshot, config, f"{url} holds snapshots of another model ({'; '.join(changes)})")
    if changes and resume != "changed":
        raise UserError(
            f"{url} holds snapshots of a run with other settings ({'; '.join(changes)}): set them back, "
            "choose another run_dir, or go on with the new ones by snapshot.resume=changed"
        )
    return changes


def check_model_fits(snapshot: StoredState, config: Config, refusal: str) -> None:
    """Raise UserError, which begins with `refusal`, unless the snapshot's weights fit `config`'s model."""
    vocab_size = config.data.vocab_size or snapshot_vocab_size(snapshot.manifest)
    shapes = snapshot_shapes(snapshot.manifest | {"config": to_dict(config)}, vocab_size)
    here = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    names = [name for name in snapshot.shapes if name.startswith("model.")]
    try:
        check_shapes({name: (snapshot.shapes[name], snapshot.dtypes[name]) for name in names}, here, "")
    except UserError:
        raise UserError(f"{refusal}: set that back, or choose another run_dir") from None


def describe_other_data(path: str, data: Data, url: str, then: dict[str, Any]) -> str:
    """Return a clause on how `data`, at `path`, differs from `then`, the data in a manifest at `url`."""
    was, now = then.get("files", {}), data.files
    if not was or not now:
        return (
            f"{path} (sha256 {data.fingerprint[:12]}...) is not the data that the snapshots in {url} were "
            f"trained on ({then['sha256'][:12]}...)"
        )
    name = first_difference(was, now) or "the order of the files, or the split,"
    return (
        f"the snapshots in {url} were trained on other token shards than those in {path}: {name} has "
        "changed, is new or is missing"
    )


def choose_environment(config: Config, context: DistributedContext, found: FoundSnapshot) -> Environment:
    """Use the CPU threads, and the float16, of the snapshot; return the environment: bits depend on it.

    Raises UserError as `check_environment` does.
    """
    if found.snapshot:
        context.use_threads(found.manifest["software"]["threads"])
        if config.trainer.dtype == "auto" and found.manifest["software"]["dtype"] == "float16":
            context.dtype = torch.float16  # other GPUs have it, too
    # build_run replaces `compiled` when it prepares the forward pass.
    compiled = found.manifest["software"].get("compiled", False)
    environment = replace(context.environment(), compiled=compiled)
    if found.snapshot and found.step < config.trainer.max_steps:
        check_environment(found, config, environment)
    return environment


def check_environment(found: FoundSnapshot, config: Config, environment: Environment) -> None:
    """Raise UserError if the run would go on training on another kind of device or in another dtype.

    snapshot.resume=changed allows that in a job's first generation; a restart never may. An evaluation alone
    (trainer.eval_only) always may.
    """
    then = found.manifest["software"]
    was = {then.get("device_type"), then["dtype"]}
    now = {environment.device_type, environment.dtype}
    is_asked_for = config.snapshot.resume == "changed" and not found.is_restart
    if was == now or is_asked_for or config.trainer.eval_only:
        return
    raise UserError(
        f"the snapshots in {found.store.url} were computed on {then.get('device_type')} in {then['dtype']} "
        f"and the workers now have {environment.device_type} and {environment.dtype}: start the job on "
        "such hardware again, or go on with this one by snapshot.resume=changed"
    )
