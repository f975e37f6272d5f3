"""Finds the newest valid snapshot that any worker can see, on disk or in a node's memory.

A sharded state is in memory as one part per worker, and each part has a copy on the next node. A step counts
if all its parts are there, from one save, wherever the parts lie. The number of workers may have changed
since. Corrupt snapshots on disk are renamed ("quarantined"), so that they are not used again.
"""

import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import DriverError, reason_of
from mingpt.base.rows import split_rows
from mingpt.config import Config, result_settings
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Check, Entries, MemorySnapshots, Snapshot, SnapshotStore
from mingpt.training.run_folder import RunFolder, refuse_where_it_fails
from mingpt.training.state import (
    TOKENIZER_TENSOR,
    Rows,
    StoredState,
    check_shard,
    is_sharded,
    snapshot_shapes,
    snapshot_vocab_size,
)

SUSPECT = "workers have computed differently since"
# Fields of the manifest that are the same in all parts of one save.
AGREEING = ("step", "windows", "vocabulary", "tokenizer", "audit", "after")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreView:
    """The snapshots that one rank sees in the store; the default is that of a rank that does not read it."""

    step: int = -1  # of the newest valid snapshot; -1 for none
    corrupt: dict[int, str] = field(default_factory=dict)  # newer snapshots: step -> reason
    unreadable: dict[int, str] = field(default_factory=dict)  # newer snapshots: step -> reason
    folder_error: str | None = None  # why the folder cannot be read
    completed_step: int = 0  # the newest step that has a manifest, valid or not; 0 for none


@dataclass(frozen=True)
class LatestSnapshot:
    """The newest valid snapshot that any rank can see, and the corrupt ones that this rank has found."""

    snapshot: StoredState | None  # None: there is none
    durable_step: int  # of the newest valid snapshot in any rank's store; 0 for none
    corrupt: dict[int, str]  # step -> reason; without those that another rank cannot read
    where: str  # the folder or URL of the snapshot, or of the store where there is none
    views: list[StoreView]  # by rank


def find_latest(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    is_restart: bool,
    check: Check = check_shard,
) -> LatestSnapshot:
    """Find the newest valid snapshot on disk or in memory that fulfils `check`, for all ranks. Collective.

    One worker per node reads. In a job's first generation, a snapshot in memory counts only if the disk still
    has one at least as new as the newest when it was saved: a user who deletes snapshots wants to go back. In
    a restart all count, as snapshots on disk may be lost with a node. Raises UserError for one of a later
    schema.
    """
    reads_store = context.launch.local_rank == 0
    found, view = context.run_with_heartbeat(
        lambda: view_store(store, check) if reads_store else (None, StoreView())
    )
    views = context.all_gather_object(view)
    newest = [max([view.step, *view.corrupt, *view.unreadable]) for view in views]  # valid or not
    saved_after = None if is_restart else max(0, *newest)
    durable_step = max(0, *(view.step for view in views))
    unreadable = {step for view in views for step in view.unreadable}  # their files are not touched
    corrupt = {step: reason for step, reason in view.corrupt.items() if step not in unreadable}
    steps = [view.step for view in views]
    in_memory = find_in_memory(memory, context, max(steps), saved_after, check)
    if in_memory:
        return LatestSnapshot(in_memory, durable_step, corrupt, str(memory.root), views)
    if max(steps) < 0:
        return LatestSnapshot(None, durable_step, corrupt, store.url, views)
    whole = Offer(max(steps), "", 0, 1, has_whole=True, reader=steps.index(max(steps)), number=0)
    stored = assemble([found] if found else [], [whole], whole, context)
    return LatestSnapshot(stored, durable_step, corrupt, store.url, views)


def view_store(store: SnapshotStore, check: Check) -> tuple[Snapshot | None, StoreView]:
    """Return the newest valid snapshot that passes `check`, or None, and this rank's view of the store.

    A part of a sharded state is not valid here. All bytes of the snapshot are read. Raises UserError for one
    of another schema. For a folder that cannot be read, the view has `folder_error`.
    """

    def check_whole(manifest: dict[str, Any], entries: Entries) -> None:
        if manifest.get("shard"):
            raise CorruptSnapshot("it is a part of a sharded state")
        check(manifest, entries)

    try:
        found, corrupt = store.find_newest(check_whole)
        step = found.manifest["step"] if found else -1
        return found, StoreView(step, corrupt, store.unreadable, None, store.completed_step())
    except UnreadableSnapshot as error:
        return None, StoreView(folder_error=str(error))


def report_skipped(latest: LatestSnapshot, url: str, config: Config) -> None:
    """Log a line for each snapshot that is not used and not renamed, and each folder that cannot be read."""
    corrupt = latest.corrupt if config.trainer.eval_only else {}  # a run that trains sets them aside
    unreadable = {step: reason for view in latest.views for step, reason in view.unreadable.items()}
    for step, reason in sorted((corrupt | unreadable).items(), reverse=True):
        log.warning(f"snapshot of step {step} in {url} skipped: {reason}")
    for reason in sorted({view.folder_error for view in latest.views if view.folder_error}):
        log.warning(reason)


def prepare_store(
    store: SnapshotStore,
    memory: MemorySnapshots,
    context: DistributedContext,
    latest: LatestSnapshot,
    is_restart: bool,
    folder: RunFolder,
) -> None:
    """Rename corrupt snapshots on disk, prepare their folder, and remove useless ones in memory. Collective.

    Only the rank that keeps a folder of snapshots renames and prepares there. Useless are those that other
    runs left behind and, in a job's first generation, those past the snapshot that it starts from. Where a
    folder cannot be written to, raises the errors of `refuse_where_it_fails`.
    """

    def prepare() -> None:
        for step, reason in latest.corrupt.items() if folder.keeps_snapshots else ():
            try:
                store.quarantine(step, reason, "suspect" if reason == SUSPECT else "damaged")
            except DriverError as error:
                raise UserError(
                    f"the corrupt snapshot of step {step} in {store.url} ({reason}) cannot be renamed: "
                    f"{reason_of(error)}"
                ) from None
        if context.launch.local_rank == 0:
            memory.remove_leftovers()
            if not is_restart:
                memory.remove_newer(latest.snapshot.manifest["step"] if latest.snapshot else -1)
        if folder.keeps_snapshots:
            store.prepare()

    refuse_where_it_fails(context, prepare)


class Offer(NamedTuple):
    """A part of a saved state, or a whole one, which rank `reader` found as number `number` and can read."""

    step: int
    key: str  # the same for all parts of one save
    rank: int  # the rank, of `workers`, whose rows the part holds
    workers: int
    has_whole: bool  # whether the part also holds the tensors that are not sharded
    reader: int
    number: int


def find_in_memory(
    memory: MemorySnapshots,
    context: DistributedContext,
    newer_than: int,
    saved_after: int | None,
    check: Check,
) -> StoredState | None:
    """Return the newest valid snapshot past step `newer_than` with all parts in memory, or None. Collective.

    A snapshot does not count if the newest on disk when it was saved was past step `saved_after`; with None
    all count. The first worker of each node reads. Parts that are not needed are not verified.
    """
    reads = context.launch.local_rank == 0
    found = context.run_with_heartbeat(lambda: memory.find(newer_than, saved_after, check) if reads else [])
    offered = dict(enumerate(found))
    while True:
        own = [describe(snapshot, context.rank, index) for index, (_, snapshot) in offered.items()]
        offers = context.all_gather_object(own)
        choice = choose(itertools.chain.from_iterable(offers))
        if choice is None:
            return None
        parts, whole = choice
        mine = {offer.number for offer in (*parts, whole) if offer.reader == context.rank}
        chosen = {index: offered[index] for index in mine}
        damaged = context.run_with_heartbeat(functools.partial(find_damaged, chosen))
        for index in damaged:
            del offered[index]
        if not any(context.all_gather_object(bool(damaged))):
            return assemble([snapshot for _, snapshot in found], parts, whole, context)


def find_damaged(found: Mapping[int, tuple[SnapshotStore, Snapshot]]) -> list[int]:
    """Return the indices of the parts that are gone, or whose bytes are not valid."""
    damaged = []
    for index, (store, snapshot) in found.items():
        try:
            store.verify(snapshot)
        except (CorruptSnapshot, UnreadableSnapshot):
            damaged.append(index)
    return damaged


def describe(snapshot: Snapshot, reader: int, number: int) -> Offer:
    manifest = snapshot.manifest
    shard = manifest.get("shard") or {"rank": 0, "workers": 1}
    has_whole = any(not is_sharded(manifest, name, entry.shape) for name, entry in snapshot.entries.items())
    return Offer(
        manifest["step"], key_of(manifest), shard["rank"], shard["workers"], has_whole, reader, number
    )


def key_of(manifest: Mapping[str, Any]) -> str:
    """Return a hash of the fields that all parts of one save have in common."""
    fields = {name: manifest.get(name) for name in AGREEING}
    fields |= {
        "config": result_settings(manifest["config"]),
        "data": manifest["data"]["sha256"],
        "shard": {key: value for key, value in (manifest.get("shard") or {}).items() if key != "rank"},
    }
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def choose(offers: Iterable[Offer]) -> tuple[list[Offer], Offer] | None:
    """Choose the newest save of which all parts are on offer; `offers` are in the order of their readers.

    Returns its parts, by the rank whose rows they hold, and the part from which the tensors that are not
    sharded are read; None if there is no such save.
    """
    saves: dict[tuple[int, str], list[Offer]] = {}
    for offer in offers:
        saves.setdefault((offer.step, offer.key), []).append(offer)
    for _, save in sorted(saves.items(), reverse=True):
        parts = {offer.rank: offer for offer in reversed(save)}
        whole = [offer for offer in save if offer.has_whole]
        if whole and len(parts) == save[0].workers:
            by_rank = [parts[rank] for rank in sorted(parts)]
            return by_rank, next((offer for offer in whole if offer in by_rank), whole[0])
    return None


def assemble(
    found: Sequence[Snapshot], parts: Sequence[Offer], whole: Offer, context: DistributedContext
) -> StoredState:
    """Return the state that the chosen parts make up; no tensor is read yet. Collective.

    `found` are the snapshots that this rank can read. `parts` are in the order of the ranks whose rows they
    hold; the tensors that are not sharded are read from `whole`.
    """
    content = None
    if whole.reader == context.rank:
        snapshot = found[whole.number]
        content = snapshot.manifest, snapshot.entries.get(TOKENIZER_TENSOR)
    manifest, tokenizer = context.broadcast_object(content, whole.reader)
    shapes = snapshot_shapes(manifest, snapshot_vocab_size(manifest))
    dtypes = dict.fromkeys(shapes, torch.float32)
    if tokenizer is not None:
        shapes[TOKENIZER_TENSOR], dtypes[TOKENIZER_TENSOR] = tokenizer.shape, torch.uint8
    rows = []
    for name, shape in shapes.items():
        offers = parts if is_sharded(manifest, name, shape) else [whole]
        ranges = split_rows(shape[0] if shape else 1, len(offers))
        rows += [
            Rows(name, part.start, part.stop, offer.reader, offer.number, part.start)
            for part, offer in zip(ranges, offers, strict=True)
            if part
        ]

    def read(piece: Rows) -> Tensor:
        begin, end = piece.begin - piece.first, piece.end - piece.first
        return found[piece.part].read(piece.name, begin, end)

    return StoredState(
        {key: value for key, value in manifest.items() if key != "shard"},
        shapes,
        dtypes,
        sorted(rows, key=lambda part: part.rank),  # so that a rank sends many rows at once
        read,
    )


def check_nothing_is_lost(
    latest: LatestSnapshot, config: Config, is_restart: bool, recorded_step: int = 0
) -> None:
    """Raise UserError if the run has, or may have, written a snapshot past step 0. Called if none is valid.

    A job that begins anew (snapshot.resume=never, in its first generation) or only evaluates passes, unless a
    snapshot cannot be read. `recorded_step` is the newest step on disk that any run.json records; 0 for none.
    """
    errors = [view.folder_error for view in latest.views if view.folder_error]
    errors += [f"step {step}: {why}" for view in latest.views for step, why in view.unreadable.items()]
    if errors:
        raise UserError(
            f"the snapshots in {latest.where} cannot be read ({shorten(errors)}): start again when they can "
            "be, or choose another run_dir"
        )
    completed = max(view.completed_step for view in latest.views)
    begins_anew = config.snapshot.resume == "never" and not is_restart
    newest = max(completed, recorded_step)
    if newest == 0 or begins_anew or config.trainer.eval_only:
        return
    reasons = [f"step {step}: {why}" for view in latest.views for step, why in view.corrupt.items()]
    if recorded_step > completed:
        reasons.append(f"run.json tells of one of step {recorded_step}, which no node has")
    raise UserError(
        f"no valid snapshot is left in {latest.where} ({shorten(reasons)}), where one of step "
        f"{newest} was written: choose another run_dir, or begin anew by "
        "snapshot.resume=never"
    )


def shorten(reasons: list[str]) -> str:
    """Return the first three reasons in one line, without repetitions."""
    return "; ".join(dict.fromkeys(reasons[:3]))
