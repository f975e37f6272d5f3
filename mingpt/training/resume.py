"""The decision whether a run may go on from the snapshot that was found or, without one, start at step 0.

Unless trainer.eval_only is set, corrupt snapshots found on disk are renamed, so that they are not used again.
A run whose snapshots past step 0 are lost or damaged does not silently start again at step 0
(`check_nothing_is_lost`).
"""

import logging
from collections.abc import Sequence

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.config import Config, differences, to_dict
from mingpt.data import Data, TextData
from mingpt.distributed import DistributedContext
from mingpt.model.weights import check_shapes
from mingpt.snapshot import Check, Entries, Found, Manifest, MemoryFolder, Store, StoredState
from mingpt.snapshot.manifest import is_distrusted
from mingpt.training.contents import check_model, tensor_shapes
from mingpt.training.run_folder import RunFolder, refuse_where_it_fails

# The settings that can change an evaluation, by the beginnings of their names.
EVALUATED = ("data.", "model.", "trainer.dtype:", "trainer.compile:", "trainer.fsdp_param_dtype:")
MAX_WINDOWS = 2**62  # a run that goes on counts up, and a manifest takes numbers below 2**63
DIFFERED = "workers have computed differently since"
log = logging.getLogger(__name__)


def make_check(
    config: Config, data: Data, job_start: int | None, distrusted: Sequence[tuple[int, int]]
) -> Check:
    """Return a check that raises CorruptSnapshot or UnreadableSnapshot for a snapshot that must not be used.

    The check raises CorruptSnapshot if a snapshot has wrong tensors, or is past the max_steps of its own
    settings, or of the same text without a tokenizer. Also raises CorruptSnapshot if the snapshot may hold
    wrong results of a worker (`is_distrusted`, which needs `distrusted`). For further errors see
    `check_model`.

    `job_start` is the step from which this job began. The check raises UnreadableSnapshot if a later snapshot
    has different data than this job, or different settings (`changed_settings`). A node that joined may have
    brought such a snapshot, which must not be renamed. If `job_start` is None (in a job's first generation,
    or if the step is not known), settings and data are not compared.
    """

    def check(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
        check_model(manifest, entries, tokenizer)
        if manifest.step > manifest.settings.trainer.max_steps:
            raise CorruptSnapshot("its step is past its own trainer.max_steps")
        if manifest.windows >= MAX_WINDOWS:
            raise CorruptSnapshot(f"no run reads {manifest.windows} windows")
        lacks_tokenizer = manifest.tokenizer.kind == "none" and isinstance(data, TextData)
        if lacks_tokenizer and manifest.data.sha256 == data.fingerprint:
            raise CorruptSnapshot("it lacks the tokenizer of the text")
        if is_distrusted(manifest, distrusted):
            raise CorruptSnapshot(DIFFERED)
        if job_start is None or manifest.step <= job_start:
            return
        changes = changed_settings(manifest, config)
        if manifest.data.sha256 != data.fingerprint:
            changes.append("data")
        if changes:
            raise UnreadableSnapshot(f"it is not of this job ({'; '.join(changes)})")

    return check


def changed_settings(manifest: Manifest, config: Config) -> list[str]:
    """Return the settings that affect the result and differ from the manifest's, as "key: old -> new".

    If trainer.compile is auto in `config`, a difference in trainer.compile is left out.
    """
    changes = differences(manifest.config, to_dict(config))
    if config.trainer.compile != "auto":
        return changes
    return [change for change in changes if not change.startswith("trainer.compile:")]


def check_snapshot(
    snapshot: StoredState | None, config: Config, url: str, data: Data, is_restart: bool, run_id: str | None
) -> list[str]:
    """Raise UserError if a generation may not start from `snapshot`; None means: start without a snapshot.

    trainer.eval_only requires a snapshot. If there is a snapshot, its data must be those of the run. A job's
    first generation (not `is_restart`) has three more requirements:

    - snapshot.resume allows the start.
    - The snapshot is of run `run_id`, unless `run_id` or the snapshot's id of a run is None. With
      trainer.eval_only, the snapshot may be of any run.
    - The settings that affect the result are those of the snapshot. With snapshot.resume=changed settings may
      differ, but the weights must fit the model, and snapshot.init_from must not have a new value.

    Returns "key: old -> new" for each setting that differs; [] in a restart. With trainer.eval_only, only
    settings that can change an evaluation count. `url` is the snapshot's place, for messages.
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
    if resume == "never" and not is_restart:
        raise UserError(
            f"{url} holds a snapshot of step {manifest.step}, and snapshot.resume=never does not go on from "
            "it: choose another run_dir"
        )
    if manifest.data.sha256 != data.fingerprint:
        raise UserError(
            f"{config.data.path} is not the data that the snapshots in {url} were trained on: choose another "
            "run_dir, with snapshot.init_from to keep the weights"
        )
    if is_restart:
        return []
    if run_id and manifest.run not in (None, run_id) and not config.trainer.eval_only:
        raise UserError(
            f"{url} holds snapshots of run {manifest.run}, and {config.run_dir} the records of run {run_id}: "
            "choose another snapshot.path, or another run_dir"
        )
    changes = changed_settings(manifest, config)
    if config.snapshot.init_from and any(change.startswith("snapshot.init_from:") for change in changes):
        raise UserError(
            f"snapshot.init_from starts a fresh run and {url} holds a snapshot of step {manifest.step}: "
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
    """Raise UserError, beginning with `refusal`, if the snapshot's weights do not fit `config`'s model."""
    shapes = tensor_shapes(config, config.data.vocab_size or snapshot.manifest.tokenizer.vocab_size)
    here = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    there = {name: shape for name, shape in snapshot.shapes.items() if name.startswith("model.")}
    try:
        check_shapes(there, here, "")
    except UserError:
        raise UserError(f"{refusal}: set that back, or choose another run_dir") from None


def check_nothing_is_lost(
    found: Found, config: Config, is_restart: bool, recorded_step: int = 0, has_records: bool = True
) -> None:
    """Raise UserError if the run has, or may have, written a snapshot past step 0.

    Call this if no valid snapshot past step 0 was found. If a snapshot on disk, or the folder of snapshots,
    cannot be read, UserError is always raised. Otherwise no error is raised if the job begins anew
    (snapshot.resume=never, without `is_restart`) or only evaluates (trainer.eval_only). `recorded_step` is
    the step of the newest snapshot that any run.json records; 0 for none. Without `has_records` there is no
    run.json on any node: in a restart this means that the disk of run_dir is away.
    """
    errors = [str(offer) for offer in found.unreadable()]
    if is_restart and not has_records:
        errors.append("run.json is gone: the disk of run_dir may be away")
    if errors:
        refusal = UserError(
            f"the snapshots in {found.where} cannot be read ({shorten(errors)}): start again when they can "
            "be, or choose another run_dir"
        )
        refusal.may_pass = True
        raise refusal
    completed = max((offer.step for offer in found.on_disk()), default=0)
    begins_anew = config.snapshot.resume == "never" and not is_restart
    newest = max(completed, recorded_step)
    if newest == 0 or begins_anew or config.trainer.eval_only:
        return
    reasons = [str(offer) for offer in found.on_disk() if offer.fault]
    if recorded_step > completed:
        reasons.append(f"run.json tells of one of step {recorded_step}, which no node has")
    raise UserError(
        f"no valid snapshot is left in {found.where} ({shorten(reasons)}), where one of step "
        f"{newest} was written: choose another run_dir, or begin anew by "
        "snapshot.resume=never"
    )


def shorten(reasons: list[str]) -> str:
    """Return the first three of `reasons` in one line, without repetitions."""
    return "; ".join(dict.fromkeys(reasons[:3]))


def report_skipped(found: Found, url: str, config: Config) -> None:
    """Log each snapshot on disk that a rank could not read, and each folder that a rank could not list.

    With trainer.eval_only also log each corrupt snapshot; a run that trains renames corrupt snapshots, and
    logs that elsewhere. `url` is where the snapshots are, for the log lines.
    """
    # A run that trains renames corrupt snapshots, and logs that.
    skipped = found.on_disk() if config.trainer.eval_only else found.unreadable()
    lines = {(offer.step, offer.fault) for offer in skipped if offer.fault}
    for step, fault in sorted(lines, reverse=True):
        what = "" if step < 0 else f"snapshot of step {step} in {url} skipped: "
        log.warning(what + fault)


def prepare_store(
    store: Store, memory: MemoryFolder, context: DistributedContext, found: Found, folder: RunFolder
) -> None:
    """Rename corrupt snapshots on disk, and remove useless snapshots from memory. Collective.

    A rank that writes snapshots to a folder renames the snapshots that `found.corrupt` returns, and prepares
    the folder for saving. The first worker of each node removes from memory all snapshots but those of the
    step that was found, and calls `MemoryFolder.remove_leftovers`. Raises the errors of
    `refuse_where_it_fails` if a folder cannot be written to.
    """

    def prepare() -> None:
        for step, reason in found.corrupt(context.rank).items() if folder.keeps_snapshots else ():
            try:
                store.quarantine(step, reason, "suspect" if reason == DIFFERED else "damaged")
            except DriverError as error:
                raise UserError(
                    f"the corrupt snapshot of step {step} in {store.url} ({reason}) cannot be renamed: "
                    f"{reason_of(error)}"
                ) from None
        if context.launch.local_rank == 0:
            memory.remove_leftovers()
            memory.clear(found.state.manifest.step if found.state else None)
        if folder.keeps_snapshots:
            store.prepare()

    refuse_where_it_fails(context, prepare)
