"""Write snapshots in the background, one at a time, and remove old ones.

A save first waits until the previous save is written, then copies the tensors into a staging buffer. A
background thread then writes the weights, the optimizer's state and the tokenizer to a file each, and the
manifest last. A rank that holds the whole state writes the state by itself. A sharded state is saved by all
ranks together. The main rank receives the other ranks' rows, one tensor after the other, and writes all rows.
The files do not depend on the sharding. The ranks' background threads exchange the rows over a process group
of their own.

A `SnapshotSaver` writes to a disk, to a URL or to a node's memory. A sharded state is saved to memory
differently: each rank's rows are a separate snapshot (memory.py).
"""

import functools
import logging
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mingpt.base.errors import ClaimLost
from mingpt.base.files import PIECE_BYTES, reason_of
from mingpt.base.rows import RowMap
from mingpt.distributed.exit import is_lost_peer
from mingpt.distributed.group import BackgroundGroup
from mingpt.snapshot.layout import FileLayout, StagingBuffer, TensorSpec, make_layout, memory_of
from mingpt.snapshot.manifest import FileRecord, Manifest
from mingpt.snapshot.store import SnapshotStore

# Takes a tensor's name; returns (rank, size in bytes) for each rank's rows that go into the file, in order.
Sources = Callable[[str], Sequence[tuple[int, int]]]
NO_LOSS = math.inf, -1  # stands for (validation loss, step) if no snapshot has a validation loss
T = TypeVar("T")
log = logging.getLogger(__name__)


class Keep(NamedTuple):
    """Which snapshots a saver keeps when it removes old ones."""

    last: int  # the number of newest snapshots that are kept
    best: bool = False  # whether the snapshot with the lowest validation loss is also kept
    # The last step at which the workers agreed (replay.py): the newest snapshot up to this step is also kept.
    replayed_step: int = 0


class Transfer:
    """Writes the tensor files of one snapshot on rank `writer`, to which the other ranks send their rows.

    `layouts` has a plan of each file, and `staging` holds this rank's rows. `sources` takes a tensor's name.
    It returns (rank, size in bytes) for each rank whose rows go into the file, in the order of the rows. The
    writer goes through the tensors in a file's order. The writer receives the rows of one rank after the
    other, at most PIECE_BYTES at a time. The writer and each rank that sends construct a Transfer, with the
    sent tensors in the same order, and call `write_files`. A rank that only sends may call `exchange`
    instead, then wait for `sent`.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        staging: StagingBuffer,
        sources: Sources,
        group: BackgroundGroup,
        writer: int = 0,
    ) -> None:
        self.staging, self.sources, self.group, self.writer = staging, sources, group, writer
        self.is_writer = group.rank == writer
        self.files = [(layout, self.chunks(layout)) for layout in layouts]
        self.sent: list[Any] = []  # the sends that this rank has begun, to be waited for

    def write_files(self, store: SnapshotStore) -> list[FileRecord]:
        """On the writer, write all files and return their records; on other ranks, send rows and return [].

        On the writer, the files are durable on return. An error in writing is raised only on the writer,
        after the writer has received all rows. The error of a lost peer is raised on the ranks that notice
        the loss.
        """
        try:
            return [store.write_file(layout, chunks) for layout, chunks in self.files if self.is_writer]
        except Exception as error:  # each driver raises exceptions of its own
            if is_lost_peer(error):
                self.files = []  # no more rows arrive
            raise
        finally:
            self.exchange()
            self.group.wait(self.sent)

    def exchange(self) -> None:
        """Exchange the rows that `write_files` has not exchanged.

        A rank that is not the writer begins to send its rows. The writer drops the rows that it receives
        here.
        """
        for _, chunks in self.files:
            for _ in chunks:
                pass

    def chunks(self, layout: FileLayout) -> Iterator[memoryview]:
        """On the writer, yield a file's bytes. Other ranks yield nothing, and begin to send their rows.

        All ranks must iterate to the end.
        """
        if self.is_writer:
            yield memoryview(layout.header)
        for name in layout.begins:
            for rank, size in self.sources(name):
                if rank == self.group.rank and self.is_writer:
                    yield from map(memory_of, self.staging.pieces([name]))
                elif rank == self.group.rank:
                    self.sent += self.group.send(self.writer, self.staging.pieces([name]))
                elif self.is_writer:
                    yield from self.receive(rank, size)

    def receive(self, rank: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes that `rank` sends, in pieces of at most PIECE_BYTES."""
        for begin in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - begin), dtype=torch.uint8)
            self.group.receive(rank, piece)
            yield memory_of(piece)


class SnapshotSaver:
    """Saves a state in the background: this rank by itself or, if `group` is given, all ranks together.

    If all ranks save together, each rank has a saver. Then `group` has all ranks, `rows` says which rows each
    rank holds, and rank `main_rank` writes and removes the files. `tokenizer` has the tokenizer's bytes
    (None: there is no tokenizer). After a failed write, on a full disk for example, training continues, and
    the next save tries again. The caller has to make sure that a run's last write succeeds.
    """

    def __init__(
        self,
        store: SnapshotStore,
        tokenizer: bytes | None = None,
        rows: RowMap | None = None,
        group: BackgroundGroup | None = None,
        main_rank: int = 0,
    ) -> None:
        self.store, self.tokenizer, self.rows, self.main_rank = store, tokenizer, rows, main_rank
        self.group = group or BackgroundGroup(0, 1)
        self.staging: StagingBuffer | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None  # of the last write; None if that write succeeded
        self.newest_written = 0  # step of the newest snapshot that was written; 0 for none
        self.best = NO_LOSS  # (the lowest validation loss of a snapshot that is kept, that snapshot's step)

    def allocate(self, tensors: Mapping[str, Tensor]) -> StagingBuffer:
        """Return the staging buffer for tensors like `tensors`. The first call allocates the buffer."""
        if self.staging is None:
            self.staging = StagingBuffer(tensors)
        return self.staging

    def stage(self, step: int, tensors: Mapping[str, Tensor]) -> Transfer:
        """Copy this rank's tensors to the staging buffer; return the Transfer that writes the copy.

        On return the tensors may change.
        """
        staging = self.allocate(tensors)
        staging.fill(tensors)
        whole = self.rows.shapes if self.rows else {}
        specs = {
            name: TensorSpec(tensor.dtype, tuple(whole.get(name, tensor.shape)))
            for name, tensor in tensors.items()
        }

        def sources(name: str) -> list[tuple[int, int]]:
            if self.rows and self.rows.by_rank(name):
                size = specs[name].dtype.itemsize
                return [(rank, size * count) for rank, count in enumerate(self.rows.numel(name))]
            return [(self.main_rank, specs[name].nbytes)]

        return Transfer(make_layout(specs, step), staging, sources, self.group, self.main_rank)

    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        keep: Keep,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the previous save is written, copy this rank's tensors, and begin to write the copy.

        On return the tensors may change. The background thread first calls `before`. Once the snapshot is
        written, the main rank's thread removes old snapshots: see `prune`. If the write or `before` fails,
        the attribute `error` keeps the error. Collective if `group` was given.
        """
        self.wait()
        transfer = self.stage(manifest.step, tensors)
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, before, keep))
        self.thread.start()

    def write(self, manifest: Manifest, transfer: Transfer, before: Callable[[], None], keep: Keep) -> None:
        """Write a snapshot; then, on the main rank, call `prune`. `save` runs this in a background thread.

        Never raises: the attribute `error` keeps the error of a failed write. A failed write is logged,
        except after a lost peer or claim, which the main thread reports. A failure of `prune` is only logged.
        Collective if there is a `group`.
        """
        step = manifest.step
        try:
            self.group.gather_on_all(before)
            self.write_once(manifest, transfer)
            self.error, self.newest_written = None, step
        except Exception as error:  # of any driver: training goes on, the failure is reported
            self.error = error
            # The main thread loses the same peer, or the same claim, and reports it.
            if not (is_lost_peer(error) or isinstance(error, ClaimLost)):
                log.warning(f"snapshot of step {step} could not be written: {reason_of(error)}")
            return
        try:
            if self.is_main:
                self.prune(keep)
        except Exception as error:  # the new snapshot is valid all the same
            log.warning(f"old snapshots could not be removed: {reason_of(error)}")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the manifest and removes old snapshots."""
        return self.group.rank == self.main_rank

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """Run `work` only on the main rank; return its result or raise its error on all ranks. Collective."""
        return self.group.on_rank(self.main_rank, work)

    def write_once(self, manifest: Manifest, transfer: Transfer) -> None:
        """Write a snapshot, durable on return. If a rank fails, all ranks raise its error. Collective.

        After an error the main rank removes the files of this step. But the files stay if the claim (the
        right to write to the store) is lost, or if the step's snapshot is complete.
        """
        step, is_complete = manifest.step, False

        def commit() -> None:
            nonlocal is_complete
            self.store.commit(manifest.with_files(records))
            is_complete, self.newest_written = True, step

        try:
            is_complete = self.on_main_rank(lambda: self.store.begin(step))
            records = self.group.gather_on_all(lambda: transfer.write_files(self.store))[self.main_rank]
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

    def prune(self, keep: Keep) -> None:
        """Delete snapshots that `keep` does not describe, and the files of older steps without a manifest.

        Snapshots that could not be read are neither counted nor deleted. Also updates `best`.
        """
        _, best = min(self.store.losses_of(self.store.steps()), default=NO_LOSS)
        steps = [step for step in self.store.steps() if step not in self.store.unreadable]
        replayed = next((step for step in steps if step <= keep.replayed_step), None)
        kept = {*steps[: keep.last], replayed, *([best] if keep.best else [])}
        for step in steps:
            if step not in kept:
                self.store.remove(step)
        # Remove files that interrupted removals have left.
        complete = self.store.steps()
        self.best = min(self.store.losses_of(complete), default=NO_LOSS)
        begun = {*self.store.steps("safetensors")} - {*complete}
        for step in begun:
            # A listing may be out of date: ask for the manifest itself.
            if step < max(complete, default=0) and not self.store.has_manifest(step):
                self.store.remove(step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the current write has ended, at most `timeout_s` seconds (None: without limit).

        Returns whether the write has ended; True if there is no write.
        """
        if self.thread:
            self.thread.join(timeout_s)
        return not (self.thread and self.thread.is_alive())
