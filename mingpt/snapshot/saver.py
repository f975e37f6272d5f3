"""Save a state in the background to one or several tiers: a disk or URL, and the nodes' memory.

A save copies the tensors to a staging buffer between two steps. A background thread then writes the copy to
each tier that is due: the weights, the optimizer's state and the tokenizer to a file each. The manifest comes
last, once these files are complete. Then old snapshots are removed.

A snapshot in any tier is whole, and the layout of its files does not depend on the number of workers. If each
rank holds the whole state, each writer of a tier writes by itself. If the state is sharded, each writer
receives the rows of all other ranks, tensor by tensor, in pieces of at most PIECE_BYTES. The ranks'
background threads exchange the rows over a process group of their own.
"""

import collections
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import Work

from mingpt.base.errors import ClaimLost
from mingpt.base.files import PIECE_BYTES, reason_of
from mingpt.base.rows import RowMap
from mingpt.distributed.exit import is_lost_peer
from mingpt.distributed.group import BackgroundGroup, picklable
from mingpt.snapshot.layout import KINDS, Layout, Staging, TensorSpec, file_name, make_layout, memory_of
from mingpt.snapshot.manifest import FileRecord, Manifest
from mingpt.snapshot.store import Store

log = logging.getLogger(__name__)


class Status(NamedTuple):
    """What `Tier.is_due` must know of a step. A generation is a job's workers between two restarts."""

    is_end: bool = False  # this generation makes no later step
    is_wanted: bool = False  # the step is to be on disk, for its validation loss
    is_busy: bool = False  # a rank that takes part in a save is still writing the previous one


@dataclass
class Tier:
    """A place for snapshots, when to save there, what to keep, and which ranks write.

    `every` is a number of steps, or 0 for no periodic saves. `keep` is the number of newest snapshots that
    stay. With `keep_best`, that with the lowest validation loss stays, too. The ranks `writers` write whole
    snapshots; the first of them is the main writer. The save at the end of a generation (a job's workers
    between two restarts) is made only by tiers with `is_durable`, which are not in memory. With `may_skip`,
    all other saves are periodic, and are left out while an earlier save is being written.
    """

    name: str  # "disk" or "memory"
    store: Store
    every: int = 1
    keep: int = 3
    writers: Sequence[int] = (0,)
    keep_best: bool = False
    may_skip: bool = False
    is_durable: bool = True
    replaces: list[Store] = field(default_factory=list)  # these are cleared after the first snapshot here
    begun: int = -1  # step of the newest save that was begun, or that the Store held at first; -1 for none
    written: int = 0  # step of the newest snapshot that this generation has written; 0 for none
    files: Sequence[FileRecord] = ()  # of that snapshot, weights first; () if this rank has written none
    error: Exception | None = None  # of the last write that failed; None once a later one has succeeded

    def is_due(self, step: int, status: Status) -> bool:
        """Return whether to save `step` to this tier, given the settings and the status."""
        if status.is_end:
            return self.is_durable and self.begun < step
        if self.may_skip and status.is_busy:
            return False
        is_wanted = status.is_wanted and self.is_durable and not self.may_skip
        return is_wanted or (self.every > 0 and step % self.every == 0)


def attempt(work: Callable[[], None]) -> Exception | None:
    """Call `work`; return the error that it raises, or None."""
    try:
        work()
    except Exception as error:  # each driver raises exceptions of its own
        return error
    return None


class Saver:
    """Saves a state to `tiers`, one save at a time. Each rank of a run has a Saver.

    `rows` says which rows each rank holds; without it, this rank holds the whole state. If the state is
    sharded, all ranks save together, and constructing the Saver and saving are collective. `tokenizer` has
    the tokenizer's bytes (None: there is no tokenizer). A failed write, on a full disk for example, raises no
    error in `save` or `wait`: `Tier.error` keeps the error until a later save to the tier succeeds.
    """

    def __init__(
        self, tiers: Sequence[Tier], tokenizer: bytes | None = None, rows: RowMap | None = None, rank: int = 0
    ) -> None:
        self.tiers, self.tokenizer, self.rows, self.rank = list(tiers), tokenizer, rows or RowMap({}), rank
        self.is_sharded = bool(self.rows.sharded)
        self.group = BackgroundGroup(rank, self.rows.workers) if self.is_sharded else BackgroundGroup(0, 1)
        self.staging: Staging | None = None
        self.layouts: list[Layout] = []  # of the tensor files of step 0
        self.thread: threading.Thread | None = None

    def takes_part(self, tier: Tier) -> bool:
        """Return whether this rank has work to do in a save to `tier`."""
        return self.is_sharded or self.rank in tier.writers

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the staging buffer, CPU memory for a copy of `tensors`, unless this Saver has one.

        `tensors` has this rank's rows, by name. A rank that writes to no tier copies only sharded tensors.
        """
        if self.staging is None:
            if not self.is_sharded:
                self.rows = RowMap({name: tuple(tensor.shape) for name, tensor in tensors.items()})
            is_writer = any(self.rank in tier.writers for tier in self.tiers)
            names = [name for name in tensors if is_writer or self.rows.by_rank(name)]
            self.staging = Staging({name: tensors[name] for name in names})
            shapes = self.rows.shapes
            specs = {name: TensorSpec(tensors[name].dtype, shapes[name]) for name in names}
            self.layouts = make_layout(specs, step=0)  # once, because it takes some milliseconds

    def save(
        self,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        tiers: Sequence[Tier] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for the previous save, copy this rank's tensors, and begin to write them to `tiers`.

        `tiers` are some of the Saver's tiers; None means all. On return the tensors may change. The
        background thread calls `before` before it writes to each durable tier. Collective if sharded.
        """
        self.wait()
        self.allocate(tensors)
        assert self.staging
        self.staging.fill(tensors)
        due = [tier for tier in (self.tiers if tiers is None else tiers) if self.takes_part(tier)]
        for tier in due:
            tier.begun = manifest.step
        self.thread = threading.Thread(target=self.write, args=(manifest, due, before))
        self.thread.start()

    def write(self, manifest: Manifest, tiers: Sequence[Tier], before: Callable[[], None]) -> None:
        """Write the staged state to each of `tiers`. `save` runs this in a background thread.

        Never raises: `Tier.error` keeps the error of a failed write. A writer of a durable tier also logs it,
        unless a peer or the claim (the right to write there) is lost. Collective if the state is sharded.
        """
        for tier in tiers:
            try:
                if tier.is_durable:
                    self.group.gather_on_all(before)
                self.write_to(tier, manifest)
            except Exception as error:  # of any driver: training goes on, the failure is reported
                tier.error = error
                # The main thread loses the same peer, or the same claim, and reports it.
                is_reported = is_lost_peer(error) or isinstance(error, ClaimLost)
                if self.rank in tier.writers and not is_reported and tier.is_durable:
                    log.warning(f"snapshot of step {manifest.step} could not be written: {reason_of(error)}")

    def write_to(self, tier: Tier, manifest: Manifest) -> None:
        """Write the staged state to one tier. Collective if the state is sharded.

        A writer commits its manifest once it has written all other files, even if another writer's disk has
        failed. If its own write fails, it calls `Store.discard`, unless the claim (the right to write there)
        is lost, and raises the error. A rank that does not write raises the error of the main writer's files,
        if any. A rank that learns of a lost peer raises an error instead, without a commit.
        """
        records = list[FileRecord]()
        outcomes = self.group.gather_on_all(lambda: self.exchange(tier, manifest.step, records))
        if self.rank not in tier.writers:
            error = outcomes[tier.writers[0]]
        else:
            error = outcomes[self.group.rank]
            error = error or attempt(lambda: tier.store.commit(manifest.with_files(records)))
            if error and not isinstance(error, ClaimLost):
                tier.store.discard(manifest.step)
        if error:
            raise error
        tier.error, tier.written, tier.files = None, manifest.step, records
        if self.rank in tier.writers:
            self.remove_old(tier, manifest)

    def exchange(self, tier: Tier, step: int, records: list[FileRecord]) -> Exception | None:
        """Send this rank's rows to the writers; on a writer, write all files but the manifest.

        Adds the files' records to `records`. Returns an error if a write has failed, else None. Raises the
        error of a lost peer. Collective if the state is sharded.
        """
        assert self.staging
        sent = list[Work | None]()
        sharded = [name for layout in self.layouts for name in layout.begins if self.rows.by_rank(name)]
        for writer in tier.writers if sharded else ():
            if writer != self.rank:
                sent += self.group.send(writer, self.staging.pieces(sharded))
        error = self.write_files(tier.store, step, records) if self.rank in tier.writers else None
        self.group.wait(sent)
        return picklable(error) if error and self.is_sharded else error

    def write_files(self, store: Store, step: int, records: list[FileRecord]) -> Exception | None:
        """Write all files but the manifest, and add their records to `records`.

        Returns the error of a failed write, or None. After an error, this rank still receives the remaining
        rows of other ranks, which wait for that. Raises the error of a lost peer.
        """
        names = [file_name(step, kind) for kind in KINDS]
        layouts = [replace(layout, name=name) for name, layout in zip(names, self.layouts, strict=False)]
        files = [(layout, self.chunks(layout)) for layout in layouts]

        def write() -> None:
            store.begin(step)
            records.extend(store.write_file(layout, chunks) for layout, chunks in files)
            if self.tokenizer is not None:
                records.append(store.write_tokenizer(step, self.tokenizer))

        error = attempt(write)
        if error and is_lost_peer(error):
            raise error  # no more rows arrive
        if error:
            for _, chunks in files:  # each generator goes on where the write has stopped
                collections.deque(chunks, maxlen=0)
        return error

    def remove_old(self, tier: Tier, manifest: Manifest) -> None:
        """Prune `tier.store`, and clear the Stores `tier.replaces`. A failure is only logged."""
        try:
            tier.store.prune(tier.keep, tier.keep_best, manifest.replayed_step)
            while tier.replaces:
                tier.replaces.pop().clear()
        except Exception as error:  # of any driver; the new snapshot is valid all the same
            log.warning(f"old snapshots could not be removed: {reason_of(error)}")

    def chunks(self, layout: Layout) -> Iterator[memoryview]:
        """Yield a file's bytes: the header, then each tensor's rows; other ranks must send theirs in turn."""
        assert self.staging
        yield memoryview(layout.header)
        for name in layout.begins:
            itemsize = self.staging.slots[name].dtype.itemsize
            sizes = {self.rank: 0}  # without sharding, only this rank's rows
            if self.rows.by_rank(name):
                sizes = {rank: itemsize * count for rank, count in enumerate(self.rows.numel(name))}
            for rank, size in sizes.items():
                if rank == self.rank:
                    yield from map(memory_of, self.staging.pieces([name]))
                else:
                    yield from self.receive(rank, size)

    def receive(self, rank: int, size: int) -> Iterator[memoryview]:
        """Yield `size` bytes that `rank` sends, in pieces of at most PIECE_BYTES."""
        for begin in range(0, size, PIECE_BYTES):
            piece = torch.empty(min(PIECE_BYTES, size - begin), dtype=torch.uint8)
            self.group.receive(rank, piece)
            yield memory_of(piece)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the current save has ended, at most `timeout_s` seconds (None: without limit).

        Returns whether the save has ended; True if there is none.
        """
        if self.thread:
            self.thread.join(timeout_s)
        return not (self.thread and self.thread.is_alive())
