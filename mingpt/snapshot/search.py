"""Find and read the newest valid snapshot that any rank sees, on disk or in a node's memory.

The first worker of each node lists what its Stores offer; for this it reads no weights. All ranks exchange
these lists, and `choose`, a pure function, picks the newest snapshot without a fault. The rank that sees it
then checks all of its bytes. If they are bad, the snapshot's offer gets a fault, and the ranks choose again.

The chosen snapshot becomes a StoredState, which all ranks read together: one rank reads some rows at a time
and broadcasts them. So no rank needs memory for a second whole state.
"""

import contextlib
import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.base.files import PIECE_BYTES
from mingpt.base.rows import RowMap, Shape, in_batches
from mingpt.distributed import DistributedContext
from mingpt.snapshot.layout import steps_in
from mingpt.snapshot.manifest import Manifest
from mingpt.snapshot.reading import Check, Entries
from mingpt.snapshot.store import Snapshot, Store, unfinished_steps

log = logging.getLogger(__name__)


class Offer(NamedTuple):
    """A snapshot that rank `reader` sees in its Store number `store`, or why it cannot be used."""

    step: int  # -1: the fault is that of a whole Store
    is_on_disk: bool
    where: str  # the folder or URL
    reader: int
    store: int
    after: int = 0  # the newest step on disk when the snapshot was saved
    fault: str = ""  # why the snapshot is not used; "" if no fault is known
    is_corrupt: bool = False  # false: the snapshot or Store cannot be read, and may be valid

    def __str__(self) -> str:
        return f"step {self.step}: {self.fault}" if self.step >= 0 else self.fault


class Reader:
    """Reads the Stores of one rank: `stores[0]` is on disk or at a URL, the others are in memory.

    `check` raises an error for a snapshot that must not be used.
    """

    def __init__(self, stores: Sequence[Store], check: Check, rank: int) -> None:
        self.stores, self.check, self.rank = stores, check, rank
        self.seen: dict[tuple[int, int], Offer] = {}  # by (number of the Store, step)
        self.opened: dict[tuple[int, int], Snapshot] = {}  # by the same

    def offers(self) -> list[Offer]:
        """Return each Store's newest snapshot without a known fault, and the newer ones with their faults.

        Raises the UserErrors of `Store.open`, for example for an unknown schema version.
        """
        return [offer for number in range(len(self.stores)) for offer in self.offers_of(number)]

    def offers_of(self, number: int) -> Iterator[Offer]:
        store = self.stores[number]
        try:
            names = {*store.list_names(), *store.list_names()}  # a first listing may be out of date
        except UnreadableSnapshot as error:
            yield Offer(-1, number == 0, store.url, self.rank, number, fault=str(error))
            return
        unfinished = {*unfinished_steps(names)} - {*steps_in(names, "json")}
        for step in steps_in(names):
            if step in unfinished:
                continue
            if (number, step) not in self.seen:
                self.seen[number, step] = Offer(step, number == 0, store.url, self.rank, number)
                with self.faults_noted(number, step):
                    snapshot = self.opened[number, step] = store.open(step, self.check)
                    after = snapshot.manifest.after
                    self.seen[number, step] = self.seen[number, step]._replace(after=after)
            yield self.seen[number, step]
            if not self.seen[number, step].fault:
                return

    @contextlib.contextmanager
    def faults_noted(self, number: int, step: int) -> Iterator[None]:
        """Return a context that catches CorruptSnapshot and UnreadableSnapshot, and notes them in `seen`.

        An UnreadableSnapshot is also noted in the Store's `unreadable`.
        """
        try:
            yield
        except (CorruptSnapshot, UnreadableSnapshot) as error:
            is_corrupt = isinstance(error, CorruptSnapshot)
            if not is_corrupt:
                self.stores[number].unreadable[step] = str(error)
            self.seen[number, step] = self.seen[number, step]._replace(
                fault=str(error), is_corrupt=is_corrupt
            )

    def verify(self, offer: Offer) -> bool:
        """Check all bytes of the snapshot if this rank offers it; return whether they are valid."""
        if offer.reader != self.rank:
            return True
        with self.faults_noted(offer.store, offer.step):
            self.stores[offer.store].verify(self.opened[offer.store, offer.step])
        return not self.seen[offer.store, offer.step].fault


def choose(offers: Iterable[Offer], saved_after: int | None) -> Offer | None:
    """Return the offer of the newest snapshot without a fault; None if there is none.

    A snapshot in memory does not count if its `after` is more than `saved_after`, unless `saved_after` is
    None. Of the same step, one on disk comes first, then that of the lowest rank.
    """
    usable = [
        offer
        for offer in offers
        if not offer.fault and (offer.is_on_disk or saved_after is None or offer.after <= saved_after)
    ]
    return max(usable, key=lambda one: (one.step, one.is_on_disk, -one.reader, -one.store), default=None)


class Piece(NamedTuple):
    """Some rows of the tensor `name`, which has `columns` elements in each row. A scalar is one row."""

    name: str
    rows: range
    columns: int

    @property
    def numel(self) -> int:
        return len(self.rows) * self.columns


@dataclass(frozen=True)
class StoredState:
    """A saved state that all ranks read together. Its tensors are float32.

    `shapes` has the shape of each tensor, by name. Rank `reader` reads `snapshot`; on all other ranks
    `snapshot` is None.
    """

    manifest: Manifest
    tokenizer: bytes | None  # the tokenizer's bytes; None: there is no tokenizer
    shapes: dict[str, Shape]
    reader: int
    snapshot: Snapshot | None

    def stream(self, names: Iterable[str], context: DistributedContext) -> Iterator[tuple[str, int, Tensor]]:
        """Yield (name, number of first row, rows) for all rows of these tensors, the same on all ranks.

        The rows are float32 on the CPU, at most PIECE_BYTES or one row at a time. The rows of several small
        tensors are sent together. Collective: all ranks must iterate to the end.
        """
        pieces = (piece for name in names for piece in self.pieces(name))
        for batch in in_batches(pieces, lambda piece: 4 * piece.numel, PIECE_BYTES):
            sizes = [piece.numel for piece in batch]
            buffer = context.on_all(functools.partial(self.read, batch))  # reading may be slow
            context.transport.broadcast(buffer, self.reader)
            for piece, part in zip(batch, buffer.split(sizes), strict=True):
                yield piece.name, piece.rows.start, part.view(-1, *self.shapes[piece.name][1:])

    def pieces(self, name: str) -> Iterator[Piece]:
        """Yield the rows of a tensor in pieces of at most PIECE_BYTES, or of one row if a row is larger."""
        shape = self.shapes[name]
        columns = math.prod(shape[1:])
        count, most = shape[0] if shape else 1, max(1, PIECE_BYTES // max(1, 4 * columns))
        for begin in range(0, count, most):
            yield Piece(name, range(begin, min(begin + most, count)), columns)

    def read(self, batch: Sequence[Piece]) -> Tensor:
        """Return the elements of these pieces as one vector, uninitialised on ranks other than the reader."""
        buffer = torch.empty(sum(piece.numel for piece in batch))
        parts = buffer.split([piece.numel for piece in batch])
        for piece, part in zip(batch, parts, strict=True):
            rows = piece.rows if self.shapes[piece.name] else None
            if self.snapshot:
                part.copy_(self.snapshot.read(piece.name, rows).view(-1))
        return buffer

    def copy_into(
        self, parts: Mapping[str, Tensor], held: RowMap, rank: int, context: DistributedContext
    ) -> None:
        """Copy the saved rows into `parts`, this rank's tensors, by name. Collective.

        `rank` is this rank, and `held` says which rows of each tensor it holds.
        """
        for name, begin, rows in self.stream(parts, context):
            copy_rows(parts[name], held.of(name, rank).start, begin, rows)


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
    """The newest valid snapshot that any rank sees, and what each rank offered, by rank."""

    state: StoredState | None  # None: there is no valid snapshot
    where: str  # the folder or URL of the snapshot; without a snapshot, that of the snapshots on disk
    offers: Sequence[Sequence[Offer]]

    def on_disk(self, rank: int | None = None) -> list[Offer]:
        """Return what rank `rank` (None: any rank) offered from its disk or URL."""
        by_rank = self.offers if rank is None else [self.offers[rank]]
        return [offer for offers in by_rank for offer in offers if offer.is_on_disk]

    def step_on_disk(self, rank: int | None = None) -> int:
        """Return the newest step on the disk of `rank` (None: of any rank) without a known fault, or -1."""
        return max((offer.step for offer in self.on_disk(rank) if not offer.fault), default=-1)

    def is_held_by(self, rank: int) -> bool:
        """Return whether the snapshot that was found is also, without a known fault, in a Store of `rank`."""
        step = self.state.manifest.step if self.state else None
        return any(offer.step == step and not offer.fault for offer in self.offers[rank])

    def faults(self) -> list[Offer]:
        """Return the offers from disks that have a fault, newest first."""
        return sorted({offer for offer in self.on_disk() if offer.fault}, reverse=True)

    def unreadable(self) -> list[str]:
        """Return a line for each snapshot on disk, and each folder, that any rank could not read.

        They may be valid.
        """
        return list(dict.fromkeys(str(offer) for offer in self.faults() if not offer.is_corrupt))

    def corrupt(self, rank: int) -> dict[int, str]:
        """Return {step: reason} for the snapshots on disk that rank `rank` found corrupt.

        A step is left out if any rank could not read the step's snapshot, because that snapshot may be valid.
        """
        unreadable = {offer.step for offer in self.faults() if not offer.is_corrupt}
        faults = [offer for offer in self.on_disk(rank) if offer.is_corrupt]
        return {offer.step: offer.fault for offer in faults if offer.step not in unreadable}


def find_latest(
    disk: Store, memory: Sequence[Store], context: DistributedContext, check: Check, is_restart: bool
) -> Found:
    """Find, for all ranks, the newest valid snapshot on disk or in memory that passes `check`. Collective.

    The first worker of each node reads `disk` and `memory`. After a restart, all snapshots in memory count,
    because snapshots on disk may be lost with a node. In a job's first generation, a snapshot in memory
    counts only if some disk has a snapshot, valid or not, of step `after` or later. `after` is a field of the
    manifest of the snapshot in memory: the newest step on disk when this snapshot was saved. If `after` is 0,
    the snapshot always counts. So a user who deletes snapshots on disk can go back to an earlier step. For
    UserErrors see `Reader.offers`.
    """
    stores = [disk, *memory] if context.launch.local_rank == 0 else []
    reader = Reader(stores, check, context.rank)
    while True:
        offers = context.gather_on_all(reader.offers)
        found = Found(None, disk.url, offers)
        newest = max((offer.step for offer in found.on_disk()), default=0)
        choice = choose([offer for one in offers for offer in one], None if is_restart else max(0, newest))
        if choice is None:
            return found
        if all(context.gather_on_all(functools.partial(reader.verify, choice))):
            return Found(share(reader, choice, context), choice.where, offers)


def share(reader: Reader, offer: Offer, context: DistributedContext) -> StoredState:
    """Return, on all ranks, the state that `offer` offers. No weights are read yet. Collective."""
    content, snapshot = None, None
    if offer.reader == context.rank:
        snapshot = reader.opened[offer.store, offer.step]
        shapes = {name: spec.shape for name, spec in snapshot.entries.items()}
        content = snapshot.manifest, snapshot.read_tokenizer(), shapes
    manifest, tokenizer, shapes = context.broadcast_object(content, offer.reader)
    return StoredState(manifest, tokenizer, shapes, offer.reader, snapshot)


def load_latest(store: Store, tensors: Mapping[str, Tensor], context: DistributedContext) -> Manifest | None:
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

    found = find_latest(store, [], context, check, is_restart=True)
    faults = found.faults()
    if found.state is None and faults:
        raise UserError(f"no snapshot in {store.url} can be used ({faults[0]}): begin in another folder")
    if found.state is None:
        return None
    for fault in faults if context.rank == 0 else ():
        log.warning(f"a snapshot in {store.url} is not used: {fault}")
    found.state.copy_into(tensors, rows, context.rank, context)
    return found.state.manifest
