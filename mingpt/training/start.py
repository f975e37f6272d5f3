"""The start of a generation (the workers between two restarts), in the same order on all ranks.

`find_start` opens and claims the run folder (a claim is one job's right to write there), and opens the data.
Then `find_start` finds the newest valid snapshot that any rank sees, and checks the snapshot against the
configuration. Without a snapshot, `find_start` opens the one of snapshot.init_from, if set. Then the data are
tokenized. The result is a StartPoint, from which run.py builds the state.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from mingpt.base.errors import UserError
from mingpt.config import Config, TrainerConfig, check_workers
from mingpt.data import Data
from mingpt.distributed import DistributedContext
from mingpt.report import RunStart, open_log
from mingpt.snapshot import (
    Found,
    Manifest,
    MemoryFolder,
    Snapshot,
    Store,
    StoredState,
    find_latest,
    open_snapshot,
)
from mingpt.training.claim import Claim
from mingpt.training.contents import check_model
from mingpt.training.resume import (
    check_nothing_is_lost,
    check_snapshot,
    make_check,
    prepare_store,
    report_skipped,
)
from mingpt.training.run_data import load_corpus, load_data
from mingpt.training.run_folder import (
    KnownRun,
    RunFolder,
    check_same_settings,
    claim_run_folder,
    open_run_folder,
    read_known_run,
    share_history,
)

NOT_BEGUN = Manifest.model_construct(step=0, windows=0)
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StartPoint(RunStart):
    """Everything that this generation starts from. `find_start` makes a StartPoint on each rank.

    Most fields are the same on all ranks. Fields about this process, or about files on this node, may differ,
    such as `is_main` and `folder`.
    """

    folder: RunFolder
    store: Store
    memory: MemoryFolder
    known: KnownRun
    found: Found
    initial: Snapshot | None  # the one of snapshot.init_from, on rank 0 of a fresh run

    @property
    def snapshot(self) -> StoredState | None:
        """The snapshot that the run goes on from; None in a fresh run."""
        return self.found.state

    @property
    def manifest(self) -> Manifest:
        """The snapshot's manifest; in a fresh run NOT_BEGUN, an incomplete manifest of step 0."""
        return self.snapshot.manifest if self.snapshot else NOT_BEGUN

    @property
    def generation(self) -> int:
        """The number of this generation, from 1: larger than those in run.json and in the snapshot."""
        return max(self.known.generation, self.manifest.generation + 1)

    @property
    def was_compiled(self) -> bool | None:
        """Whether the snapshot's model was compiled; None if nothing has been trained yet."""
        return bool(self.manifest.software.compiled) if self.step else None

    @property
    def evaluation_missing(self) -> bool:
        """Whether an evaluation must be made before training goes on from this step.

        False if `is_due` says that no evaluation is due, or if the step is past trainer.max_steps. Otherwise
        true at step 0, because a run that starts again at step 0 drops the records of step 0. At a later
        step, true unless the snapshot's manifest records an evaluation of the step (`evaluated_step`).
        """
        trainer = self.config.trainer
        if self.step > trainer.max_steps or not is_due(trainer, self.step):
            return False
        return self.step == 0 or self.manifest.evaluated_step != self.step

    @property
    def nothing_left(self) -> bool:
        """Whether a new job has nothing to do: the run has reached max_steps and is not recorded as running.

        False in a restart, or if an evaluation is missing. A run stays recorded as running if the last job
        died before it recorded the end.
        """
        is_complete = self.snapshot is not None and self.step >= self.config.trainer.max_steps
        return is_complete and self.known.is_reported and not self.is_restart and not self.evaluation_missing


def find_start(config: Config, context: DistributedContext) -> StartPoint:
    """Claim and open the run folder, open the data, and find the state to start from. Collective.

    With trainer.eval_only, the run folder is not claimed. Raises UserError if the settings, folders, data or
    snapshots do not allow the start. If the job goes on without some nodes, raises NodeRefused on their
    ranks, and PeersMissing on all other ranks. A request to stop raises StopRequested, or ends the process.
    """
    check_same_settings(config, context)
    folder = open_run_folder(config, context)
    claim = claim_run_folder(context, folder)
    open_log(context.rank, folder.path if folder.is_kept else None, claim.may_write)
    if context.idle_gpus:
        log.info(context.idle_gpus)
    data = load_data(config, context)
    store = context.on_all(lambda: open_store(config, context, claim))
    known = read_known_run(context, folder, claim.holder.job)
    if not known.is_restart:
        check_workers(config, context.world_size)
    found = find_snapshot(config, context, folder, store, data, known)
    changes = check_snapshot(found.state, config, found.where, data, known.is_restart, known.run_id)
    manifest = found.state.manifest if found.state else NOT_BEGUN
    # If the run folder is new, the run is the one whose snapshot was found.
    run_id = known.run_id or manifest.run or known.token
    memory = MemoryFolder(config.snapshot.memory_path, run_id, folder.path)
    if not config.trainer.eval_only:
        prepare_store(store, memory, context, found, folder)
        if not folder.is_shared:
            share_history(context, folder, manifest.step)
    initial, weights = None, config.snapshot.init_from
    if weights and not found.state:
        open_it = partial(open_snapshot, weights, check_model, weights_only=True)
        initial = context.on_all(lambda: open_it() if context.rank == 0 else None)
    corpus = load_corpus(config, context, data, found.state, known.is_restart, initial)
    if found.state:
        go_on_as_before(config, context, manifest, known.is_restart, store.url)
    log_every = manifest.settings.trainer.log_every if found.state else 1
    return StartPoint(
        config=config,
        corpus=corpus,
        run_id=run_id,
        step=manifest.step,
        is_restart=known.is_restart,
        durable_step=max(0, found.step_on_disk()),
        changes=changes,
        workers=context.world_size,
        hosts=[host for _, host in sorted({(place.node_rank, place.host) for place in context.places})],
        previous=context.previous_generation,
        process_began=context.exit.began_at,
        job=claim.holder.job,
        is_main=context.rank == 0,
        logged_step=manifest.step // log_every * log_every,
        check_claim=claim.check,
        may_write=claim.may_write,
        folder=folder,
        store=store,
        memory=memory,
        known=known,
        found=found,
        initial=initial,
    )


def is_due(trainer: TrainerConfig, step: int) -> bool:
    """Return whether an evaluation is due after `step` steps; with step 0, at the start of a run."""
    if step == 0:
        return trainer.eval_at_start
    return step == trainer.max_steps or step % trainer.eval_every == 0


def find_snapshot(
    config: Config, context: DistributedContext, folder: RunFolder, store: Store, data: Data, known: KnownRun
) -> Found:
    """Find the newest snapshot that the run may go on from, on disk or in memory. Collective.

    Raises the UserErrors of `find_latest` and, if no valid snapshot past step 0 is found, those of
    `check_nothing_is_lost`.
    """
    in_memory: list[Store] = []
    if known.run_id:
        in_memory = MemoryFolder(config.snapshot.memory_path, known.run_id, folder.path).stores()
    distrusted = [(entry["after"], entry["before_generation"]) for entry in known.distrusted]
    check = make_check(config, data, known.job_start, distrusted)
    found = find_latest(store, in_memory, context, check, known.is_restart)
    if found.state is None or found.state.manifest.step == 0:
        has_records = known.run_id is not None
        check_nothing_is_lost(found, config, known.is_restart, known.durable_step, has_records)
    if context.rank == 0:
        report_skipped(found, store.url, config)
        for entry in known.distrusted:
            if entry["before_generation"] == known.generation:  # this generation is the next one
                workers, after = " or ".join(entry["workers"]), entry["after"]
                log.warning(f"{workers} computed wrongly: nothing that was saved after step {after} is used")
    return found


def open_store(config: Config, context: DistributedContext, claim: Claim) -> Store:
    """Return the Store for this run's snapshots.

    The store calls `claim.check` before a file gets its final name or is uploaded. Raises UserError, only on
    this rank, if snapshot.path is a URL whose driver is not installed. Also raises UserError if snapshot.path
    begins with memory:// and a launcher has started this process.
    """
    url = config.snapshot.path or str(Path(config.run_dir) / "snapshots")
    store = Store(url, check_claim=claim.check)
    if store.is_process_private and context.launch.is_distributed:
        raise UserError(
            f"snapshot.path {store.url} lives in the memory of one process and cannot bring back workers "
            "that died: use a folder or an object store"
        )
    return store


def go_on_as_before(
    config: Config, context: DistributedContext, manifest: Manifest, is_restart: bool, url: str
) -> None:
    """Use the number of CPU threads, and perhaps the dtype, in the snapshot's manifest: bits depend on both.

    The snapshot's dtype is used only if it is float16 and trainer.dtype is auto. Raises UserError if the run
    would go on with a different kind of device or a different dtype. Such changes are allowed in a job's
    first generation (not `is_restart`) with snapshot.resume=changed. Such changes are also allowed with
    trainer.eval_only, or if the run has reached max_steps. The message calls the snapshots' place `url`.
    """
    then = manifest.software
    context.use_threads(then.threads)
    if config.trainer.dtype == "auto" and then.dtype == "float16":
        context.dtype = torch.float16  # which all GPUs have
    now = context.environment()
    is_allowed = config.snapshot.resume == "changed" and not is_restart
    is_over = manifest.step >= config.trainer.max_steps or config.trainer.eval_only
    if {then.device_type, then.dtype} == {now.device_type, now.dtype} or is_allowed or is_over:
        return
    raise UserError(
        f"the snapshots in {url} were computed on {then.device_type} in {then.dtype} and the workers now "
        f"have {now.device_type} and {now.dtype}: start the job on such hardware again, or go on with this "
        "one by snapshot.resume=changed"
    )
