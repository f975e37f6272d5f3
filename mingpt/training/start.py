"""The start of a generation (the workers between two restarts): one sequence, the same on all ranks.

It opens the run folder, claims it (a claim is one job's right to write there), opens the data, finds the
newest snapshot that any rank sees, checks it against the configuration, reads the weights to start with if
there is no snapshot, and makes the tokens. The result is a StartPoint, from which build.py makes the state.
"""

import logging
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mingpt.base.errors import UserError
from mingpt.config import Config, check_workers
from mingpt.data import Corpus, Data
from mingpt.distributed import DistributedContext
from mingpt.distributed.device import Environment
from mingpt.report import open_log
from mingpt.snapshot import Manifest, MemorySnapshots, SnapshotStore, StoredState, find_latest
from mingpt.training.audit import START
from mingpt.training.claim import Claim, claim_run_folder
from mingpt.training.initial_weights import InitialWeights, open_weights
from mingpt.training.resume import (
    check_nothing_is_lost,
    check_snapshot,
    make_check,
    prepare_store,
    report_skipped,
)
from mingpt.training.run_data import load_corpus, load_data
from mingpt.training.run_folder import (
    RunFolder,
    check_same_settings,
    choose_run,
    open_run_folder,
    read_node_records,
    share_history,
)
from mingpt.training.state import stored_rows

NOT_BEGUN = Manifest.model_construct(step=0, windows=0, audit=START)
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
    durable_step: int  # step of the newest snapshot on any disk without a known fault; 0 for none
    own_step: int  # the same of the disk that this rank reads; -1 for none
    changes: list[str]  # settings that differ from the snapshot's on purpose
    discarded_after: list[int]  # see is_suspect

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest; without a snapshot, one with those fields that a fresh run uses."""
        return self.snapshot.manifest if self.snapshot else NOT_BEGUN

    @property
    def step(self) -> int:
        """The step of the snapshot; 0 without one."""
        return self.manifest.step


@dataclass(frozen=True)
class StartPoint(FoundSnapshot):
    """Everything that this generation starts from; `find_start` makes it."""

    folder: RunFolder
    claim: Claim
    corpus: Corpus
    environment: Environment
    initial: InitialWeights | None  # the weights of snapshot.init_from, on rank 0 of a fresh run

    @property
    def was_compiled(self) -> bool | None:
        """Whether the snapshot's model was compiled; None if nothing has been trained yet."""
        return bool(self.manifest.software.compiled) if self.step else None

    @property
    def logged_step(self) -> int:
        """The newest step, not past the snapshot's, that must have a record of metrics; 0 for none."""
        if self.snapshot is None:
            return 0
        log_every = self.snapshot.manifest.settings.trainer.log_every
        return self.step // log_every * log_every


def find_start(config: Config, context: DistributedContext) -> StartPoint:
    """Claim and open the run folder, open the data, and find what the run goes on from. Collective.

    Raises UserError, NonRetryableError or, if the job goes on without a node, NodeRefused on that node's
    ranks and PeersMissing on the others. A request to stop raises StopRequested.
    """
    check_same_settings(config, context)
    folder = open_run_folder(config, context)
    claim = claim_run_folder(context, folder)
    open_log(context.rank, folder.path if folder.is_kept else None, claim.may_write)
    data = load_data(config, context)
    found = find_snapshot(config, context, folder, claim, data)
    initial, weights = None, config.snapshot.init_from
    if weights and not found.snapshot:
        initial = context.on_all(lambda: open_weights(weights) if context.rank == 0 else None)
    corpus = load_corpus(config, context, data, found.snapshot, found.is_restart, initial)
    environment = choose_environment(config, context, found)
    if context.idle_gpus:
        log.info(context.idle_gpus)
    return StartPoint(
        **vars(found), folder=folder, claim=claim, corpus=corpus, environment=environment, initial=initial
    )


def find_snapshot(
    config: Config, context: DistributedContext, folder: RunFolder, claim: Claim, data: Data
) -> FoundSnapshot:
    """Find the newest snapshot and check that the run can go on from it. Collective.

    Unless the run only evaluates, also prepares the places of snapshots and copies the records to all run
    folders. Raises UserError or, if the job goes on without a node, NodeRefused or PeersMissing.
    """
    store = context.on_all(lambda: open_store(config, context, claim))
    own = read_node_records(context, folder, claim.holder.job)
    # The store may have been lost with its host: then run.json tells of an earlier generation.
    told = context.all_gather_object((own, own.was_started or context.was_started()))
    records, is_restart = [one for one, _ in told], any(was_started for _, was_started in told)
    if not is_restart:
        check_workers(config, context.world_size)
    known_id = choose_run(context, folder.path, records)
    memory_path = config.snapshot.memory_path
    suspects = max((one.suspects for one in records), key=len)
    discarded_after = [entry["after"] for entry in suspects]
    starts = [one.job_start for one in records if one.job_start is not None]
    job_start = max(starts, default=None) if is_restart else None
    check = make_check(config, data, job_start, discarded_after)
    in_memory = MemorySnapshots(memory_path, known_id, folder.path).stores() if known_id else []
    latest = find_latest(store, in_memory, context, check, stored_rows, is_restart)
    if latest.state is None or latest.state.manifest.step == 0:
        check_nothing_is_lost(latest, config, is_restart, max(one.durable_step for one in records))
    if context.rank == 0:
        report_skipped(latest, store.url, config)
    changes = check_snapshot(latest.state, config, latest.where, data, is_restart, known_id)
    # A new run folder goes on with the run whose snapshot was found.
    named = latest.state.manifest.run if latest.state else None
    run_id = known_id or named or context.broadcast_object(uuid.uuid4().hex, 0)
    memory = MemorySnapshots(memory_path, run_id, folder.path)
    found = FoundSnapshot(
        run_id,
        is_restart,
        store,
        memory,
        latest.state,
        max(0, *(view.step for view in latest.views)),
        latest.views[context.rank].step,
        changes,
        discarded_after,
    )
    if context.rank == 0 and len(suspects) > len(found.manifest.discarded_after):
        workers, after = " or ".join(suspects[-1]["workers"]), suspects[-1]["after"]
        log.warning(f"{workers} computed wrongly: nothing that was saved after step {after} is used")
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, latest, folder)
        share_history(context, folder, found.step)
    return found


def open_store(config: Config, context: DistributedContext, claim: Claim) -> SnapshotStore:
    """Return the store of this run's snapshots, which writes nothing once `claim` is lost.

    Raises UserError, on this rank alone, for a URL whose driver is not installed or, under a launcher, for a
    memory:// URL.
    """
    url = config.snapshot.path or str(Path(config.run_dir) / "snapshots")
    store = SnapshotStore(url, check_claim=claim.check)
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def choose_environment(config: Config, context: DistributedContext, found: FoundSnapshot) -> Environment:
    """Use the CPU threads, and the float16, of the snapshot; return the environment: bits depend on it.

    Raises UserError as `check_environment` does.
    """
    if found.snapshot:
        context.use_threads(found.manifest.software.threads)
        if config.trainer.dtype == "auto" and found.manifest.software.dtype == "float16":
            context.dtype = torch.float16  # other GPUs have it, too
    # build_run replaces `compiled` when it prepares the forward pass.
    compiled = found.manifest.software.compiled if found.snapshot else False
    environment = replace(context.environment(), compiled=compiled)
    if found.snapshot and found.step < config.trainer.max_steps:
        check_environment(found, config, environment)
    return environment


def check_environment(found: FoundSnapshot, config: Config, environment: Environment) -> None:
    """Raise UserError if the run would go on training on another kind of device or in another dtype.

    snapshot.resume=changed allows that in a job's first generation; a restart never may. An evaluation alone
    (trainer.eval_only) always may.
    """
    then = found.manifest.software
    was = {then.device_type, then.dtype}
    now = {environment.device_type, environment.dtype}
    is_asked_for = config.snapshot.resume == "changed" and not found.is_restart
    if was == now or is_asked_for or config.trainer.eval_only:
        return
    raise UserError(
        f"the snapshots in {found.store.url} were computed on {then.device_type} in {then.dtype} "
        f"and the workers now have {environment.device_type} and {environment.dtype}: start the job on "
        "such hardware again, or go on with this one by snapshot.resume=changed"
    )
