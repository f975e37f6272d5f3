"""Find and read the newest valid snapshot that any rank sees, on disk or in a node's memory.

The first worker of each node lists the newest snapshots that it could read from its SnapshotStores; for this
it reads no weights. All ranks exchange these lists, and `choose`, a pure function, picks the newest save
whose parts are all listed. A whole state is one part; a sharded state in memory has one part for each worker
that saved the state. The number of workers may have changed in the meantime. The ranks that are to read the
chosen parts then check all bytes of these parts. If a part is bad, it is left out, and the ranks choose
again.

A chosen save becomes a StoredState, which says for each tensor which rank reads which rows. All ranks read
the state together: `StoredState.stream` reads some rows at a time on one rank and broadcasts them. So no rank
needs memory for a second whole state.
"""

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import PIECE_BYTES
from mingpt.base.rows import RowMap, Shape, in_batches
from mingpt.config import result_settings
from mingpt.distributed import DistributedContext
from mingpt.snapshot.layout import steps_in
from mingpt.snapshot.manifest import Manifest
from mingpt.snapshot.reading import Check, Entries
from mingpt.snapshot.store import Snapshot, SnapshotStore, unfinished_steps

log = logging.getLogger(__name__)
# How many snapshots of a SnapshotStore in memory are offered. A kill during a save in parts may leave the
# newest step in only some of the SnapshotStores, so the step before it is also offered.
OFFERS_IN_MEMORY = 2
# Fields of the manifest that are the same in all parts of one save.
AGREEING = {"step", "windows", "tokenizer", "after", "shard"}
RowsOf = Callable[[Manifest], RowMap]  # returns which rows each part of the save with this manifest holds


class Offer(NamedTuple):
    """A saved state, or one part of it, that rank `reader` can read from its SnapshotStore number `store`."""

    step: int
    is_on_disk: bool
    key: str  # the same for all parts of one save
    part: int  # the rank whose rows this part has; 0 for a whole state
    workers: int  # the number of parts; 1 for a whole state
    has_whole: bool  # whether this part also has the tensors that are not sharded
    after: int  # of a snapshot in memory: the newest step on disk when it was saved; else 0
    reader: int
    store: int


class Fault(NamedTuple):
    """Why the snapshot of `step` is not used; if `step` is -1, why a whole SnapshotStore is not used."""

    step: int
    reason: str
    is_corrupt: bool  # if false, the snapshot or store cannot be read, and may be valid

    def __str__(self) -> str:
        return f"step {self.step}: {self.reason}" if self.step >= 0 else self.reason


class View(NamedTuple):
    """What one rank found in its SnapshotStores; empty on a rank that reads no store."""

    offers: Sequence[Offer] = ()
    faults: Sequence[Fault] = ()  # only those of the store on disk
    completed_step: int = 0  # the newest step on disk that has a manifest, valid or not; 0 for none

    @property
    def step(self) -> int:
        """The step of the newest snapshot on disk without a known fault; -1 if there is none."""
        return max((offer.step for offer in self.offers if offer.is_on_disk), default=-1)


class Reader:
    """Reads the SnapshotStores of one rank: `stores[0]` is on disk or at a URL, the others are in memory.

    `check` raises an error for a snapshot that must not be used; `rows_of` returns which rows each part of a
    saved state holds.
    """

    def __init__(self, stores: Sequence[SnapshotStore], check: Check, rows_of: RowsOf, rank: int) -> None:
        self.stores, self.check, self.rows_of, self.rank = stores, check, rows_of, rank
        self.opened: dict[tuple[int, int], Snapshot] = {}  # by (number of the store, step)
        self.faults: dict[tuple[int, int], Fault] = {}  # by the same; these snapshots are no longer offered

    def view(self) -> View:
        """Open the newest snapshots of each store; return a View that offers those without a known fault.

        At most one snapshot on disk, and OFFERS_IN_MEMORY snapshots of each store in memory, are offered. A
        store that cannot be listed offers nothing.
        Raises the UserErrors of `SnapshotStore.open`, for example for an unknown schema version.
        """
        offers, completed_step = list[Offer](), 0
        for number, store in enumerate(self.stores):
            try:
                names = {*store.list_names(), *store.list_names()}  # a first listing may be out of date
            except UnreadableSnapshot as error:
                self.faults[number, -1] = Fault(-1, str(error), False)
                continue
            complete = steps_in(names, "json")
            completed_step = completed_step if number else max([0, *complete])
            unfinished = {*unfinished_steps(names)} - {*complete}
            steps = [step for step in steps_in(names) if step not in unfinished]
            valid = filter(functools.partial(self.can_open, number), steps)
            most = OFFERS_IN_MEMORY if number else 1  # on disk each snapshot holds a whole state
            offers += [self.describe(number, step) for step in itertools.islice(valid, most)]
        faults = [fault for (number, _), fault in self.faults.items() if number == 0]
        return View(offers, faults, completed_step)

    def can_open(self, number: int, step: int) -> bool:
        """Return whether the snapshot of `step` in store `number` can be opened and has no known fault.

        Opening checks the manifest, the files' sizes and headers, and calls `check`. A snapshot is opened
        only once, and `opened` keeps the snapshot.
        """
        if (number, step) not in self.opened.keys() | self.faults.keys():
            with self.faults_noted(number, step):
                snapshot = self.stores[number].open(step, self.check)
                if number == 0 and snapshot.manifest.shard:
                    raise CorruptSnapshot("it is a part of a sharded state")
                self.opened[number, step] = snapshot
        return (number, step) not in self.faults

    @contextlib.contextmanager
    def faults_noted(self, number: int, step: int) -> Iterator[None]:
        """Return a context that catches CorruptSnapshot and UnreadableSnapshot, and adds them to `faults`.

        After such an error, the snapshot of `step` in store `number` is no longer offered. An
        UnreadableSnapshot is also added to the store's `unreadable`.
        """
        try:
            yield
        except CorruptSnapshot as error:
            self.faults[number, step] = Fault(step, str(error), True)
        except UnreadableSnapshot as error:
            self.faults[number, step] = Fault(step, str(error), False)
            self.stores[number].unreadable[step] = str(error)

    def describe(self, number: int, step: int) -> Offer:
        snapshot = self.opened[number, step]
        manifest, rows = snapshot.manifest, self.rows_of(snapshot.manifest)
        part = manifest.shard.rank if manifest.shard else 0
        has_whole = not manifest.shard or any(
            name in snapshot.entries and not rows.by_rank(name) for name in rows.shapes
        )
        is_on_disk, key = number == 0, key_of(manifest)
        return Offer(step, is_on_disk, key, part, rows.workers, has_whole, manifest.after, self.rank, number)

    def snapshot_of(self, offer: Offer) -> Snapshot | None:
        """Return the snapshot of an offer; None if a different rank is to read that snapshot."""
        return self.opened[offer.store, offer.step] if offer.reader == self.rank else None

    def verify(self, offers: Iterable[Offer]) -> bool:
        """Check all bytes of the snapshots in `offers` that this rank reads; return whether all are valid."""
        mine = {(offer.store, offer.step) for offer in offers if offer.reader == self.rank}
        for number, step in mine:
            with self.faults_noted(number, step):
                self.stores[number].verify(self.opened[number, step])
        return not mine & self.faults.keys()


def key_of(manifest: Manifest) -> str:
    """Return a hash of manifest fields that are the same in all parts of one save."""
    fields = manifest.model_dump(include=AGREEING, exclude={"shard": {"rank"}})
    fields |= {"config": result_settings(manifest.config), "data": manifest.data.sha256}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def choose(offers: Iterable[Offer], saved_after: int | None) -> tuple[list[Offer], Offer] | None:
    """Return the parts of the newest save whose parts are all offered; None if there is no such save.

    The result is a pair. The first item has the offers of the parts, sorted by the rank whose rows they hold.
    The second is the offer from which to read the tensors that are not sharded; a save without such an offer
    does not count. `offers` must be sorted by `reader`. A save in memory does not count if its `after` is
    more than `saved_after`; if `saved_after` is None, `after` is ignored. If a step was saved both on disk
    and in memory, the save on disk comes first.
    """
    saves: dict[tuple[int, bool, str], list[Offer]] = {}
    for offer in offers:
        if saved_after is None or offer.after <= saved_after:
            saves.setdefault((offer.step, offer.is_on_disk, offer.key), []).append(offer)
    for _, save in sorted(saves.items(), reverse=True):
        parts = {offer.part: offer for offer in reversed(save)}
        whole = [offer for offer in save if offer.has_whole]
        if whole and len(parts) == save[0].workers:
            by_rank = [parts[rank] for rank in sorted(parts)]
            return by_rank, next((offer for offer in whole if offer in by_rank), whole[0])
    return None


class Source(NamedTuple):
    """Some rows of the tensor `name`, which `rank` reads. A scalar is one row."""

    name: str
    rows: range
    numel: int  # the number of elements in these rows
    rank: int
    snapshot: Snapshot | None  # from which `rank` reads the rows; None on all other ranks


@dataclass(frozen=True)
class StoredState:
    """A saved state that all ranks read together. Its tensors are float32.

    `shapes` has the full shape of each tensor, by name. `sources` says which rank reads which rows of a
    tensor: the Sources of a tensor together have all of its rows.
    """

    manifest: Manifest
    tokenizer: bytes | None  # the tokenizer's bytes; None: there is no tokenizer
    shapes: dict[str, Shape]
    sources: dict[str, list[Source]]

    def stream(self, names: Iterable[str], context: DistributedContext) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, number of first row, rows) for each Source of these tensors, the same on all ranks.

        The rank of a Source reads the rows and broadcasts them; the rows of several small Sources may be sent
        together. The rows are float32 on the CPU. Collective: all ranks must iterate to the end.
        """
        for batch in self.batches(names):
            sizes, rank = [source.numel for source in batch], batch[0].rank
            buffer = context.on_all(functools.partial(read_all, batch))  # reading may be slow
            if context.rank != rank:
                buffer = torch.empty(sum(sizes))
            context.transport.broadcast(buffer, rank)
            for source, part in zip(batch, buffer.split(sizes), strict=True):
                yield source.name, source.rows.start, part.view(-1, *self.shapes[source.name][1:])

    def copy_into(
        self, parts: Mapping[str, Tensor], held: RowMap, rank: int, context: DistributedContext
    ) -> None:
        """Copy the saved rows into `parts`, this rank's tensors, by name. Collective.

        `rank` is this rank, and `held` says which rows of each tensor it holds.
        """
        for name, begin, rows in self.stream(parts, context):
            copy_rows(parts[name], held.of(name, rank).start, begin, rows)

    def batches(self, names: Iterable[str]) -> Iterator[list[Source]]:
        """Yield lists of Sources of the tensors `names`; the rows of all Sources in a list are sent together.

        One rank reads all Sources of a list. The rows of these Sources have at most PIECE_BYTES together,
        unless the list has only one Source.
        """
        sources = [source for name in names for source in self.sources[name]]
        by_rank = itertools.groupby(sorted(sources, key=lambda one: one.rank), lambda one: one.rank)
        for _, of_rank in by_rank:
            yield from in_batches(of_rank, lambda one: 4 * one.numel, PIECE_BYTES)


def read_all(batch: Sequence[Source]) -> Tensor:
    """Return the elements of these Sources as one vector; an empty vector on ranks that do not read them."""
    read = [source.snapshot.read(source.name).view(-1) for source in batch if source.snapshot]
    return read[0] if len(read) == 1 else torch.cat([torch.empty(0), *read])


@torch.no_grad()
def copy_rows(part: Tensor, first: int, begin: int, rows: Tensor) -> None:
    """Copy `rows` into `part`, except rows that `part` has no place for.

    `rows` are the rows of a tensor from row `begin` on; `part` holds the rows of the same tensor from row
    `first` on. If the tensor is a scalar, `part` is this scalar, and `rows` has one element.
    """
    if not part.ndim:
        part.copy_(rows.view(()))
        return
    low, high = max(first, begin), min(first + len(part), begin + len(rows))
    if low < high:
        part[low - first : high - first].copy_(rows[low - begin : high - begin])


@dataclass(frozen=True)
class Found:
    """The newest valid snapshot that any rank sees, and the View of each rank, by rank."""

    state: StoredState | None  # None: there is no valid snapshot
    where: str  # the folder or URL of the snapshot; without a snapshot, that of the snapshots on disk
    views: Sequence[View]

    def corrupt(self, rank: int) -> dict[int, str]:
        """Return {step: reason} for the snapshots on disk that rank `rank` found corrupt.

        A step is left out if any rank could not read the step's snapshot, because that snapshot may be valid.
        """
        unreadable = {fault.step for fault in self.unreadable()}
        faults = self.views[rank].faults
        return {one.step: one.reason for one in faults if one.is_corrupt and one.step not in unreadable}

    def unreadable(self) -> list[Fault]:
        """Return the faults of the snapshots on disk that any rank could not read, newest first.

        If a rank could not list the folder, the fault has step -1. Snapshots that could not be read may be
        valid.
        """
        faults = {fault for view in self.views for fault in view.faults if not fault.is_corrupt}
        return sorted(faults, reverse=True)


def find_latest(
    disk: SnapshotStore,
    memory: Sequence[SnapshotStore],
    context: DistributedContext,
    check: Check,
    rows_of: RowsOf,
    is_restart: bool,
) -> Found:
    """Find, for all ranks, the newest valid snapshot on disk or in memory that passes `check`. Collective.

    The first worker of each node reads `disk` and `memory`. After a restart, all snapshots in memory count,
    because snapshots on disk may be lost with a node. In a job's first generation, a snapshot in memory
    counts only if some disk has a snapshot, valid or not, of step `after` or later. `after` is a field of the
    manifest of the snapshot in memory: the newest step on disk when this snapshot was saved. If `after` is 0,
    the snapshot always counts. So a user who deletes snapshots on disk can go back to an earlier step. For
    `check` and `rows_of` see `Reader`; for UserErrors see `Reader.view`.
    """
    stores = [disk, *memory] if context.launch.local_rank == 0 else []
    reader = Reader(stores, check, rows_of, context.rank)
    while True:
        views = context.gather_on_all(reader.view)
        newest = [max([view.step, *(fault.step for fault in view.faults)]) for view in views]  # valid or not
        offers = [offer for view in views for offer in view.offers]
        choice = choose(offers, None if is_restart else max(0, *newest))
        if choice is None:
            return Found(None, disk.url, views)
        parts, whole = choice
        if all(context.gather_on_all(functools.partial(reader.verify, [*parts, whole]))):
            state, where = assemble(reader, parts, whole, context)
            return Found(state, where, views)


def load_latest(
    store: SnapshotStore, tensors: Mapping[str, Tensor], context: DistributedContext
) -> Manifest | None:
    """Copy the newest valid snapshot that any rank sees into `tensors`, on all ranks; return its manifest.

    Use this in a training loop of your own in which each rank has the whole state, `tensors`, in float32.
    Returns None if there is no snapshot. Raises UserError, only on this rank, if `tensors` are not float32.
    All ranks raise UserError if the snapshot has other names, types or shapes. All ranks also raise UserError
    if no snapshot can be used, but there are some or a rank cannot list the folder. Collective.
    """
    for name, tensor in tensors.items():
        if tensor.dtype != torch.float32:
            raise UserError(f"{name} is {tensor.dtype}, and only float32 can be read from a snapshot")
    rows = RowMap({name: tuple(tensor.shape) for name, tensor in tensors.items()})

    def check(manifest: Manifest, entries: Entries, tokenizer: bytes | None) -> None:
        there = {name: entry.shape for name, entry in entries.items() if entry.dtype == torch.float32}
        if there != rows.shapes or len(there) < len(entries):
            raise UserError(f"{store.url} holds a snapshot of other tensors: go on in another folder")

    found = find_latest(store, [], context, check, lambda manifest: rows, is_restart=True)
    faults = [str(fault) for view in found.views for fault in view.faults]
    if found.state is None and faults:
        raise UserError(f"no snapshot in {store.url} can be used ({faults[0]}): begin in another folder")
    if found.state is None:
        return None
    for fault in faults if context.rank == 0 else ():
        log.warning(f"a snapshot in {store.url} is not used: {fault}")
    found.state.copy_into(tensors, rows, context.rank, context)
    return found.state.manifest


def assemble(
    reader: Reader, parts: Sequence[Offer], whole: Offer, context: DistributedContext
) -> tuple[StoredState, str]:
    """Return the state that consists of the chosen parts, and the folder or URL from which `whole` is read.

    No weights are read yet. `parts` are sorted by the rank whose rows they hold. The tensors that are not
    sharded will be read from the offer `whole`. Collective.
    """
    content = None
    if whole.reader == context.rank:
        snapshot = reader.opened[whole.store, whole.step]
        content = snapshot.manifest, snapshot.read_tokenizer(), reader.stores[whole.store].url
    manifest, tokenizer, where = context.broadcast_object(content, whole.reader)
    rows, sources = reader.rows_of(manifest), dict[str, list[Source]]()
    for name in rows.shapes:
        columns = math.prod(rows.shapes[name][1:])
        for offer in parts if rows.by_rank(name) else [whole]:
            held = rows.of(name, offer.part)
            source = Source(name, held, len(held) * columns, offer.reader, reader.snapshot_of(offer))
            sources.setdefault(name, []).append(source)
    return StoredState(
        manifest.model_copy(update={"shard": None}), tokenizer, dict(rows.shapes), sources
    ), where
