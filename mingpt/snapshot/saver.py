"""Write snapshots in the background, one at a time, and prune old ones.

A rank that holds the whole state writes it alone. If the state is sharded, each rank holds some rows, and all
ranks save together: the main rank receives the other ranks' rows of one tensor after the other and writes
them, so the files do not depend on the sharding. Training continues meanwhile: background threads write and
exchange, over a process group of their own.
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from mingpt.base.errors import ClaimLost, CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import PIECE_BYTES, reason_of
from mingpt.distributed import DistributedContext
from mingpt.distributed.background_group import BackgroundGroup
from mingpt.distributed.exit import is_lost_peer
from mingpt.snapshot.layout import (
    FileLayout,
    RowsByRank,
    StagingBuffer,
    TensorSpec,
    make_layout,
    memory_of,
    specs_of,
)
from mingpt.snapshot.manifest import FileRecord, Manifest, validation_loss
from mingpt.snapshot.store import SnapshotStore

# A function that computes manifest fields in the background.
LateFields = Callable[[], dict[str, Any]]
T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sharding:
    """The ranks that save a state together, and the rows that each of them holds.

    Without a `context` the state is not sharded: this rank, number 0 of 1, holds the whole state and
    exchanges nothing.
    """

    context: DistributedContext | None = None  # of the ranks that share the rows
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)  # of the whole tensors
    rows_by_rank: RowsByRank = dict[str, list[range]]().get  # by default all ranks hold all rows
    weights_are_sharded: bool = False  # if not, each rank has all weights
    main_rank: int = 0  # writes on disk, and prunes

    @property
    def rank(self) -> int:
        return self.context.rank if self.context else 0

    @property
    def local_rank(self) -> int:
        """The number of this rank among the ranks on its node; 0 if the state is not sharded."""
        return self.context.launch.local_rank if self.context else 0

    @property
    def world_size(self) -> int:
        return self.context.world_size if self.context else 1

    def all_gather_object(self, value: T) -> list[T]:
        """Return the values of all ranks, by rank. Collective."""
        return self.context.all_gather_object(value) if self.context else [value]


UNSHARDED = Sharding()


class Transfer:
    """Writes the tensor files of one snapshot to a store. Every rank of `sharding` has a transfer.

    `layouts` has a plan of each file, and `staging` this rank's bytes. The main rank writes. For each tensor
    in a file's order it receives the rows of one rank after the other, in pieces of at most PIECE_BYTES.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        staging: StagingBuffer,
        group: BackgroundGroup,
        sharding: Sharding = UNSHARDED,
    ) -> None:
        self.layouts, self.staging, self.group, self.sharding = layouts, staging, group, sharding
        self.main_rank, self.is_main = sharding.main_rank, group.rank == sharding.main_rank

    def write_files(self, store: SnapshotStore) -> list[FileRecord]:
        """Write all files, durable on return; returns their records for the manifest. Collective.

        An error in writing is raised on all ranks, and that of a lost peer on those that notice it.
        """
        if self.group.world_size == 1:
            return [store.write_file(layout, self.staging.chunks(layout)) for layout in self.layouts]
        records: list[FileRecord] = []
        error: Exception | None = None
        for layout in self.layouts:
            chunks = self.chunks(layout)
            if self.is_main and error is None:
                try:
                    records.append(store.write_file(layout, chunks))
                except Exception as problem:  # each driver raises exceptions of its own
                    if is_lost_peer(problem):
                        raise
                    error = problem
            for _ in chunks:
                pass  # send this rank's rows, or receive the others' although writing has failed

        def outcome() -> list[FileRecord]:
            if error is not None:
                raise error
            return records

        return self.group.on_rank(self.main_rank, outcome)

    def chunks(self, layout: FileLayout) -> Iterator[memoryview]:
        """Yield a file on the main rank; on others nothing: they send. Collective: iterate to the end."""
        if self.is_main:
            yield memoryview(layout.header)
        for name in layout.begins:
            rows_by_rank = self.sharding.rows_by_rank(name)
            if rows_by_rank is None and self.is_main:
                yield from self.own_pieces(name)
            for rank, rows in enumerate(rows_by_rank or ()):
                spec = self.sharding.specs[name]
                yield from self.rows_of(rank, name, spec.nbytes // spec.shape[0] * len(rows))

    def own_pieces(self, name: str) -> Iterator[memoryview]:
        return map(memory_of, self.staging.pieces([name]))

    def rows_of(self, rank: int, name: str, size: int) -> Iterator[memoryview]:
        """Yield, on the main rank, the `size` bytes of a tensor that `rank` holds, and which `rank` sends."""
        if size and rank == self.group.rank == self.main_rank:
            yield from self.own_pieces(name)
        elif size and rank == self.group.rank:
            for piece in self.staging.pieces([name]):
                self.group.send_and_receive([(self.main_rank, piece)], [])
        elif self.is_main:
            for begin in range(0, size, PIECE_BYTES):
                piece = torch.empty(min(PIECE_BYTES, size - begin), dtype=torch.uint8)
                self.group.send_and_receive([], [(rank, piece)])
                yield memory_of(piece)


class SnapshotSaver:
    """Saves a state in the background; if it is sharded, each rank has a saver and all save together.

    After a failed write, on a full disk for example, training continues, and the next save tries again; only
    the last write must succeed, see `finish`. `prune` tells which snapshots are kept. Constructing a saver is
    collective: all ranks of `sharding` do it together.
    """

    def __init__(
        self,
        store: SnapshotStore,
        keep_last: int,
        keep_best: bool,
        sharding: Sharding = UNSHARDED,
        tokenizer: bytes | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.store, self.keep_last, self.keep_best, self.sharding = store, keep_last, keep_best, sharding
        self.replayed_step = 0  # the newest snapshot up to this step is kept
        self.group = BackgroundGroup(sharding.rank, sharding.world_size)
        self.losses: dict[int, float | None] = {}  # validation loss at each step that has a snapshot
        self.staging: StagingBuffer | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None  # of the last write
        self.newest_written = 0  # step of the newest snapshot that was written

    def allocate(self, tensors: Mapping[str, Tensor]) -> StagingBuffer:
        """Return the staging buffer for a state like `tensors`; the first call allocates it."""
        if self.staging is None:
            self.staging = StagingBuffer(tensors)
        return self.staging

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensor], late_fields: LateFields = dict) -> None:
        """Wait for the write of the last save to end, copy this rank's tensors, and begin to write them.

        On return the tensors may change. The background thread adds the fields that `late_fields` returns to
        the manifest. If the write fails, it keeps the error in `error`. Collective.
        """
        self.wait()
        staging = self.allocate(tensors)
        staging.fill(tensors)
        specs = {**specs_of(tensors), **self.sharding.specs}  # of the whole tensors
        layouts = make_layout(specs, manifest.step)
        transfer = Transfer(layouts, staging, self.group, self.sharding)
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, late_fields))
        self.thread.start()

    def write(self, manifest: Manifest, transfer: Transfer, late_fields: LateFields = dict) -> None:
        """Write a snapshot, then prune; runs in the background. Raises nothing; sets `error`. Collective."""
        step = manifest.step
        try:
            fields = self.group.on_all_ranks(late_fields)[self.group.rank]
            self.write_once(manifest.model_copy(update=fields), transfer)
            self.error, self.newest_written = None, step
        except Exception as error:  # of any driver: training goes on, the failure is reported
            self.error = error
            # The main thread loses the same peer, or the same claim, and reports it.
            if not (is_lost_peer(error) or isinstance(error, ClaimLost)):
                log.warning(f"snapshot of step {step} could not be written: {reason_of(error)}")
            return
        try:
            if self.is_main:
                self.prune()
        except Exception as error:  # the new snapshot is valid all the same
            log.warning(f"old snapshots could not be removed: {reason_of(error)}")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the manifest and prunes."""
        return self.group.rank == self.sharding.main_rank

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; all ranks return its result or raise its error. Collective."""
        return self.group.on_rank(self.sharding.main_rank, work)

    def write_once(self, manifest: Manifest, transfer: Transfer) -> None:
        """Write a snapshot, durable on return. Raises any rank's error on all ranks. Collective.

        After an error the snapshot's files are removed, except if the claim to the place (the right to write
        there) is lost, or if the snapshot is complete: it was before, or the error came after its manifest.
        """
        step, is_complete = manifest.step, False

        def commit() -> None:
            nonlocal is_complete
            self.store.commit(manifest.with_files(records))
            is_complete, self.newest_written = True, step

        try:
            is_complete = self.on_main_rank(lambda: self.store.begin(step))
            records = transfer.write_files(self.store)
            if self.tokenizer is not None:
                write_tokenizer = functools.partial(self.store.write_tokenizer, step, self.tokenizer)
                records.append(self.on_main_rank(write_tokenizer))
            self.on_main_rank(commit)
        except ClaimLost:
            raise
        except Exception:  # each driver raises exceptions of its own
            if self.is_main and not is_complete:
                self.store.discard(step)
            raise

    def find_best(self, steps: list[int]) -> int | None:
        """Return the one of `steps` with the lowest validation loss; None without `keep_best` or a loss."""
        unreadable = self.store.unreadable
        for step in steps:
            if step not in self.losses and step not in unreadable:
                try:
                    self.losses[step] = validation_loss(self.store.read_manifest(step))
                except CorruptSnapshot:
                    self.losses[step] = None
                except (UnreadableSnapshot, UserError) as error:  # perhaps of another version
                    unreadable[step] = str(error)
        self.losses = {step: self.losses[step] for step in steps if step in self.losses}
        known = {step: loss for step, loss in self.losses.items() if loss is not None}
        return min(known, key=known.__getitem__, default=None) if self.keep_best else None

    def best_loss(self, last_step: int) -> float:
        """Return the lowest loss of snapshots up to `last_step`; infinity if `find_best` finds none."""
        best = self.find_best([step for step in self.store.steps() if step <= last_step])
        loss = None if best is None else self.losses[best]
        return math.inf if loss is None else loss

    def prune(self) -> None:
        """Delete all snapshots but the newest `keep_last`, the best, and the newest up to `replayed_step`.

        The best is kept if `keep_best` is set. Unreadable snapshots are neither counted nor deleted. Files of
        interrupted removals are deleted, too.
        """
        best = self.find_best(self.store.steps())
        steps = [step for step in self.store.steps() if step not in self.store.unreadable]
        replayed = next((step for step in steps if step <= self.replayed_step), None)
        for step in steps[self.keep_last :]:
            if step not in (best, replayed):
                self.store.remove(step)
        # Remove files that interrupted removals have left.
        complete = self.store.steps()
        begun = {*self.store.steps("safetensors")} - {*complete}
        for step in begun:
            if step < max(complete, default=0) and not self.store.has_manifest(step):  # a listing may be late
                self.store.remove(step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the current write, if any, has ended, at most `timeout_s`; return whether it has."""
        if self.thread:
            self.thread.join(timeout_s)
        return not (self.thread and self.thread.is_alive())

    def finish(self) -> None:
        """Wait for the last write, if any, to end; raise its error if it failed."""
        self.wait()
        if self.error:
            raise self.error
