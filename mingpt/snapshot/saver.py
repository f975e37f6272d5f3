"""Write snapshots in the background, one at a time, and remove old ones.

A save copies the tensors into a staging buffer, for which training waits. A background thread then writes two
tensor files and the tokenizer, and the manifest last. A rank that holds the whole state writes it by itself.
If the state is sharded, each rank holds some rows, and all ranks save together: the main rank receives the
other ranks' rows of one tensor after the other and writes them, so that the files do not depend on the
sharding. The background threads exchange the rows over a process group of their own.

The same saver writes to a disk, to a URL and to a node's memory. In memory no rank gathers rows: each rank
saves only its part, as a snapshot of its own (memory.py).
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

# A function that computes manifest fields in the background.
LateFields = Callable[[], dict[str, Any]]
# Takes a tensor's name; returns (rank, bytes) for the parts of the tensor, in their order.
Sources = Callable[[str], Sequence[tuple[int, int]]]
NO_LOSS = math.inf, -1
T = TypeVar("T")
log = logging.getLogger(__name__)


class Keep(NamedTuple):
    """Which snapshots a saver leaves when it removes old ones."""

    last: int  # the number of newest snapshots that stay
    best: bool = False  # also the one with the lowest validation loss
    replayed_step: int = 0  # also the newest one up to this step, at which the workers last agreed


class Transfer:
    """Writes the tensor files of one snapshot on rank `writer`, to which the other ranks send their parts.

    `layouts` has a plan of each file, and `staging` this rank's bytes. `sources` returns the parts of a
    tensor, by its name: (rank that holds the part, size in bytes), in order. For each tensor in a file's
    order, the writer receives one part after the other, in pieces of at most PIECE_BYTES. The writer, and
    each rank that sends, has a Transfer of the same layouts and calls `write_files`; a rank that only sends
    may call `exchange` instead.
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
        self.sent: list[Any] = []  # what this rank has begun to send

    def write_files(self, store: SnapshotStore) -> list[FileRecord]:
        """Write all files, durable on return; return their records on the writer, an empty list elsewhere.

        An error in writing is raised only on the writer, after it has received all parts; the error of a lost
        peer is raised on the ranks that notice it.
        """
        try:
            return [store.write_file(layout, chunks) for layout, chunks in self.files if self.is_writer]
        except Exception as error:  # each driver raises exceptions of its own
            if is_lost_peer(error):
                self.files = []  # nothing more comes
            raise
        finally:
            self.exchange()
            self.group.wait(self.sent)

    def exchange(self) -> None:
        """Finish the exchange of each file: begin to send this rank's parts, or receive other ranks' parts.

        The writer drops what it receives here, because its file is complete, or writing it has failed.
        """
        for _, chunks in self.files:
            for _ in chunks:
                pass

    def chunks(self, layout: FileLayout) -> Iterator[memoryview]:
        """Yield a file's bytes on the writer; on other ranks yield nothing, and begin to send their parts.

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
    """Saves a state in the background; if it is sharded, each rank has a saver and all save together.

    A rank that saves by itself has no `group`. Otherwise `group` has all ranks, `rows` tells what each of
    them holds, and the main rank writes and removes the files. After a failed write, on a full disk for
    example, training continues, and the next save tries again; the caller has to make sure that a run's last
    write succeeds.
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
        self.error: Exception | None = None  # of the last write
        self.newest_written = 0  # step of the newest snapshot that was written
        self.best = NO_LOSS  # the lowest validation loss of a snapshot that is kept, and its step

    def allocate(self, tensors: Mapping[str, Tensor]) -> StagingBuffer:
        """Return the staging buffer for a state like `tensors`; the first call allocates it."""
        if self.staging is None:
            self.staging = StagingBuffer(tensors)
        return self.staging

    def stage(self, step: int, tensors: Mapping[str, Tensor]) -> Transfer:
        """Copy this rank's tensors, which may then change; return the transfer that writes the copy."""
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
        self, manifest: Manifest, tensors: Mapping[str, Tensor], keep: Keep, late_fields: LateFields = dict
    ) -> None:
        """Wait until the previous save is written, copy this rank's tensors, and begin to write the copy.

        On return the tensors may change. The background thread adds the fields that `late_fields` returns to
        the manifest, and, once the snapshot is written, removes all snapshots but those to `keep`. If the
        write fails, the attribute `error` keeps the error. Collective if there is a `group`.
        """
        self.wait()
        transfer = self.stage(manifest.step, tensors)
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, late_fields, keep))
        self.thread.start()

    def write(self, manifest: Manifest, transfer: Transfer, late_fields: LateFields, keep: Keep) -> None:
        """Write a snapshot, then remove old ones, in a background thread. Collective if there is a `group`.

        Raises nothing: `error` keeps the error of a failed write, and failures are logged.
        """
        step = manifest.step
        try:
            fields = self.group.gather_on_all(late_fields)[self.group.rank]
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
                self.prune(keep)
        except Exception as error:  # the new snapshot is valid all the same
            log.warning(f"old snapshots could not be removed: {reason_of(error)}")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes the manifest and removes old snapshots."""
        return self.group.rank == self.main_rank

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank; all ranks return its result or raise its error. Collective."""
        return self.group.on_rank(self.main_rank, work)

    def write_once(self, manifest: Manifest, transfer: Transfer) -> None:
        """Write a snapshot, durable on return. If any rank fails, all ranks raise its error. Collective.

        After an error the snapshot's files are removed, except if the claim (the right to write there) is
        lost, or if the snapshot is complete: an earlier save of this step was complete, or the error came
        after the manifest was written.
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
        """Delete all snapshots but those to `keep`, and the files of interrupted removals.

        Unreadable snapshots are neither counted nor deleted.
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
            if step < max(complete, default=0) and not self.store.has_manifest(step):  # a listing may be old
                self.store.remove(step)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the current write, if any, at most `timeout_s` seconds; return whether it has ended."""
        if self.thread:
            self.thread.join(timeout_s)
        return not (self.thread and self.thread.is_alive())
