"""Writes snapshots in the background, one at a time, and prunes old ones.

A whole state is a sharded state with one holder: a rank that has all of it writes it by itself. Else each
rank holds some rows and all write together, several files at once where they see one folder. The files do not
show which: the rank that writes a file receives the others' bytes in chunks. Training goes on meanwhile, so
background threads do it, over a process group of their own.
"""

import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.base.errors import ClaimLost, CorruptSnapshot, SaveAborted, UnreadableSnapshot, UserError
from mingpt.base.files import PIECE_BYTES, reason_of, retry
from mingpt.distributed import DistributedContext
from mingpt.distributed.background_group import BackgroundGroup, picklable
from mingpt.snapshot.layout import (
    PART_BYTES,
    FileLayout,
    RowsByRank,
    Run,
    StagingBuffer,
    TensorSpec,
    cut,
    find_runs,
    make_layout,
    memory_of,
    specs_of,
)
from mingpt.snapshot.manifest import FileRecord
from mingpt.snapshot.store import NO_ROOM, SnapshotStore

# Manifest fields that are computed in the background; may raise SaveAborted.
LateFields = Callable[[], dict[str, Any]]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """The ranks that save a state together, and which rows each of them holds.

    Without a `context` the state is not sharded: this rank, number 0 of 1, has all of it and exchanges
    nothing.
    """

    context: DistributedContext | None = None  # of the ranks that hold the rows between them
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the whole tensors
    rows_by_rank: RowsByRank = dict[str, list[range]]().get  # all ranks hold everything
    weights_are_sharded: bool = False  # else each rank has all weights
    main_rank: int = 0  # names the snapshot on disk and prunes
    writers: Sequence[int] = (0,)  # ranks that write files to disk

    @property
    def rank(self) -> int:
        return self.context.rank if self.context else 0

    @property
    def local_rank(self) -> int:
        """The number of this rank among those on its node."""
        return self.context.launch.local_rank if self.context else 0

    @property
    def world_size(self) -> int:
        return self.context.world_size if self.context else 1

    def all_gather_object(self, value: T) -> list[T]:
        """Each rank's value, by rank. Collective."""
        return self.context.all_gather_object(value) if self.context else [value]


UNSHARDED = Sharding()


class Transfer:
    """Brings the tensor files of a snapshot into a store, once or, where there was no room, again.

    `runs` tells where the bytes of each file are, beyond its header; `staging` holds this rank's. `writers`
    are the ranks that write files. In a group of one rank all bytes are here, and `runs` is not used.
    Every rank of the group has a transfer, and its methods are collective.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        staging: StagingBuffer,
        runs: Sequence[Sequence[Run]] = (),
        group: BackgroundGroup | None = None,
        writers: Sequence[int] = (0,),
    ) -> None:
        self.layouts, self.staging, self.runs = layouts, staging, runs
        self.group, self.writers = group or BackgroundGroup(0, 1), writers

    def write_files(self, store: SnapshotStore, step: int) -> list[FileRecord]:
        """Write the files; returns them as the manifest lists them, all of them durable.

        What keeps one rank from writing, all ranks raise. Where the store is no folder, they try again before
        that: all files together after each pause, or, with one rank, the store does, file by file.
        """
        if self.group.world_size == 1:
            return [store.write_file(layout, self.staging.chunks(layout)) for layout in self.layouts]

        def on_failure(failure: Exception) -> None:
            is_no_room = getattr(failure, "errno", None) in NO_ROOM
            if is_no_room or isinstance(failure, (ClaimLost, SaveAborted)):
                raise failure
            if self.group.rank == self.writers[0]:
                log.info(f"writing step {step} to {store.url} failed ({reason_of(failure)}) and is retried")

        pauses_s = () if store.is_local else store.retries_s
        return retry(lambda: self.write_files_once(store), pauses_s, on_failure)

    def write_files_once(self, store: SnapshotStore) -> list[FileRecord]:
        """Raises on all ranks what keeps one from writing, and SaveAborted if a rank is gone."""
        records: list[FileRecord] = []
        error: Exception | None = None
        for first in range(0, len(self.layouts), len(self.writers)):
            batch = dict(zip(self.writers, range(first, len(self.layouts)), strict=False))
            chunks = self.chunks(batch)
            try:
                if self.group.rank in batch:
                    records.append(store.write_file(self.layouts[batch[self.group.rank]], chunks))
            except SaveAborted:
                raise
            except Exception as problem:  # each driver raises exceptions of its own
                error = error or problem
            for _ in chunks:
                pass  # what this rank does not write it still has to send
        outcomes = self.group.all_gather_object((records, picklable(error)))
        for _, error_there in outcomes:
            if error_there is not None:
                raise error_there
        by_name = {record.name: record for found, _ in outcomes for record in found}
        return [by_name[layout.name] for layout in self.layouts]

    def chunks(self, batch: Mapping[int, int]) -> Iterator[memoryview]:
        """Yield the bytes of the file that this rank writes, while it sends its parts of the others.

        `batch` is the number of each writer's file. The next chunk travels while this one is hashed and
        written.
        """
        number = batch.get(self.group.rank)
        longest = max(self.layouts[file].size for file in batch.values())
        wait = self.exchange(batch, 0)
        for begin in range(0, longest, PIECE_BYTES):
            wait_for_next = self.exchange(batch, begin + PIECE_BYTES)  # past the end, of nothing
            received, wait = wait(), wait_for_next
            if number is not None and begin < self.layouts[number].size:
                yield self.assemble(number, begin, received)
        wait()

    def exchange(self, batch: Mapping[int, int], begin: int) -> Callable[[], Sequence[Tensor]]:
        """Begin to send the files' chunks from `begin` on; the result waits for those of this rank's file."""
        sent: list[list[Tensor]] = [[] for _ in range(self.group.world_size)]
        sizes = [0] * self.group.world_size
        for writer, number in batch.items():
            for piece in cut(self.runs[number], begin, begin + PIECE_BYTES):
                size = piece.end - piece.begin
                if piece.rank == self.group.rank:
                    sent[writer].append(self.staging.parts[piece.name][piece.offset : piece.offset + size])
                if writer == self.group.rank:
                    sizes[piece.rank] += size
        return self.group.all_to_all(sent, sizes)

    def assemble(self, number: int, begin: int, received: Sequence[Tensor]) -> memoryview:
        """A file's chunk from `begin` on, of what the ranks have sent of it."""
        layout = self.layouts[number]
        chunk = memory_of(torch.empty(min(PIECE_BYTES, layout.size - begin), dtype=torch.uint8))
        header = layout.header[begin : begin + PIECE_BYTES]
        chunk[: len(header)] = header
        taken = [0] * self.group.world_size
        for piece in cut(self.runs[number], begin, begin + PIECE_BYTES):
            size, rank, first = piece.end - piece.begin, piece.rank, piece.begin - begin
            chunk[first : first + size] = memory_of(received[rank][taken[rank] : taken[rank] + size])
            taken[rank] += size
        return chunk


class SnapshotSaver:
    """Saves a state in the background; where it is sharded, each rank has a saver and all save together.

    A write that fails is reported and training goes on; the last one must succeed, see `finish`. Where there
    is no room for a snapshot, older ones are removed for it, but not the newest that is valid. Constructing a
    saver and `save` are collective.
    """

    def __init__(
        self,
        store: SnapshotStore,
        keep_last: int,
        keep_best: bool,
        sharding: Sharding = UNSHARDED,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self.store, self.keep_last, self.keep_best, self.sharding = store, keep_last, keep_best, sharding
        self.replayed_step = 0  # the newest snapshot up to this step is kept
        self.part_bytes = part_bytes  # of the largest file, unless a tensor is larger
        self.group = BackgroundGroup(sharding.rank, sharding.world_size)
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
        """Copy what this rank holds and begin to write it; waits for the write before.

        On return the tensors may change.
        """
        self.wait()
        staging = self.allocate(tensors)
        staging.fill(tensors)
        sharding = self.sharding
        specs = {**specs_of(tensors), **sharding.specs}  # of the whole tensors
        layouts = make_layout(specs, manifest["step"], self.part_bytes)
        runs = [find_runs(layout, specs, sharding.rows_by_rank, sharding.main_rank) for layout in layouts]
        transfer = Transfer(layouts, staging, runs, self.group, sharding.writers)
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, late_fields))
        self.thread.start()

    def write(self, manifest: dict[str, Any], transfer: Transfer, late_fields: LateFields = dict) -> None:
        """Write a snapshot and prune; the background thread does this."""
        step = manifest["step"]
        try:
            fields = self.group.on_all_ranks(late_fields)[self.group.rank]
            self.write_making_room(manifest | fields, transfer)
            self.error, self.newest_written = None, step
        except Exception as error:  # whatever the driver raises: training goes on, the failure is reported
            self.error = error
            # The main thread loses the same peer, or the same claim, and reports it.
            if not isinstance(error, (SaveAborted, ClaimLost)):
                log.warning(f"snapshot of step {step} could not be written: {reason_of(error)}")
            return
        try:
            if self.is_main:
                self.prune()
        except Exception as error:  # the new snapshot is valid all the same
            log.warning(f"old snapshots could not be removed: {reason_of(error)}")

    @property
    def is_main(self) -> bool:
        """Whether this rank names the snapshot and prunes."""
        return self.group.rank == self.sharding.main_rank

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """Do `work` there; all ranks return, or raise, what it does. Collective."""
        return self.group.on_rank(self.sharding.main_rank, work)

    def write_making_room(self, manifest: dict[str, Any], transfer: Transfer) -> None:
        """Write a snapshot; while there is no room for it, remove an older one and try again. Collective."""
        step, is_written = manifest["step"], False
        while not is_written:
            try:
                self.write_once(manifest, transfer)
                is_written = True
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                removed = self.on_main_rank(lambda: self.remove_one_before(step))
                if removed is None:
                    raise
                log.warning(
                    f"snapshot of step {removed} is removed: there was no room for that of step {step}"
                )

    def write_once(self, manifest: dict[str, Any], transfer: Transfer) -> None:
        """Write a snapshot; durable on return. Nothing is left of one that fails. Collective.

        A snapshot that is complete stays, even if a rank dies before all have heard of it.
        """
        step, is_committed = manifest["step"], False

        def commit() -> None:
            nonlocal is_committed
            self.store.commit(manifest, records)
            is_committed, self.newest_written = True, step

        try:
            self.on_main_rank(lambda: self.store.begin(step))
            records = transfer.write_files(self.store, step)
            self.on_main_rank(commit)
        except ClaimLost:
            raise
        except Exception:  # each driver raises exceptions of its own
            if self.is_main and not is_committed:
                self.store.discard(step)
            raise

    def remove_one_before(self, step: int) -> int | None:
        """Remove the oldest snapshot, the best one last, and keep the newest valid one; returns its step."""
        older = [one for one in self.store.steps() if one < step and one not in self.store.unreadable]
        newest_valid = next((one for one in older if self.is_valid(one)), 0)
        removable = [one for one in older if one < newest_valid]
        if not removable:
            return None
        best = self.find_best(older)
        oldest = min((one for one in removable if one != best), default=removable[-1])
        self.store.remove(oldest)
        return oldest

    def is_valid(self, step: int) -> bool:
        try:
            self.store.read(step)
        except (CorruptSnapshot, UnreadableSnapshot, UserError) as error:
            log.warning(f"snapshot of step {step} is not valid: {error}")
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

    def best_loss(self, last_step: int) -> float:
        """The lowest validation loss of the snapshots up to a step, if the best is kept; else infinity."""
        best = self.find_best([step for step in self.store.steps() if step <= last_step])
        loss = None if best is None else self.losses[best]
        return math.inf if loss is None else loss

    def prune(self) -> None:
        """Delete all but the newest `keep_last`, the best, and the newest one up to `replayed_step`.

        Those that could not be read do not count.
        """
        best = self.find_best(self.store.steps())
        steps = [step for step in self.store.steps() if step not in self.store.unreadable]
        replayed = next((step for step in steps if step <= self.replayed_step), None)
        for step in steps[self.keep_last :]:
            if step not in (best, replayed):
                self.store.remove(step)
        # Removals that were cut short have left something.
        complete = self.store.steps()
        begun = {*self.store.steps("safetensors")} - {*complete}
        for step in begun:
            if step < max(complete, default=0) and not self.store.has_manifest(step):  # a listing may be late
                self.store.remove(step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the write under way, at most so long; returns whether it is over."""
        if self.thread:
            self.thread.join(timeout_s)
        return not (self.thread and self.thread.is_alive())

    def finish(self) -> None:
        """Wait until the last snapshot is durable; raises what kept it from being written."""
        self.wait()
        if self.error:
            raise self.error


def validation_loss(manifest: dict[str, Any]) -> float | None:
    """The validation loss measured at the snapshot's own step."""
    record = manifest["metrics"].get("val", {})
    return record.get("val/loss") if record.get("step") == manifest["step"] else None
