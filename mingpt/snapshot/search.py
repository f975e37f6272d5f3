"""Find and read the newest valid snapshot that a run may use, on disk, at a URL or in a node's memory.

The first worker of each node lists what its Stores offer; for this it reads no weights. All ranks exchange
these lists, and `choose`, a pure function, picks one of the snapshots without a fault. The rank that offered
it then checks all of its bytes. If this check fails, the offer gets a fault, and the ranks choose again.

The chosen snapshot becomes a StoredState, which all ranks read together: one rank reads PIECE_BYTES at a time
and broadcasts them. So no rank needs memory for a second whole state.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mingpt.base.errors import CorruptSnapshot, UnreadableSnapshot
from mingpt.base.files import PIECE_BYTES
from mingpt.base.rows import RowMap, Shape
from mingpt.distributed import DistributedContext
from mingpt.snapshot.layout import Layout, TensorSpec, lay_out, memory_of
from mingpt.snapshot.manifest import Manifest
from mingpt.snapshot.reading import Check
from mingpt.snapshot.store import Snapshot, Store

log = logging.getLogger(__name__)
BadSnapshot = (CorruptSnapshot, UnreadableSnapshot)
Content = tuple[bytes | None, list[dict[str, TensorSpec]]]  # the tokenizer's bytes, and each file's tensors


class Offer(NamedTuple):
    """A snapshot that rank `reader` sees in its Store number `store`, and its `fault`, if any is known."""

    step: int  # -1: the fault is that of a whole Store
    is_on_disk: bool
    where: str  # the folder or URL
    reader: int
    store: int
    manifest: Manifest | None = None  # None: there is none, or it cannot be used
    fault: str = ""  # why the snapshot is not used; "" if no fault is known
    is_corrupt: bool = False  # false: the snapshot or Store cannot be read, and may be valid

    @property
    def after(self) -> int:
        """The newest step known to be on disk when the snapshot was saved; 0 if none, or not recorded."""
        return self.manifest.after if self.manifest else 0

    def __str__(self) -> str:
        return f"step {self.step}: {self.fault}" if self.step >= 0 else self.fault


class Reader:
    """Reads the Stores of one rank: `stores[0]` is on disk or at a URL, the others are in memory.

    `check` raises an error for a snapshot that must not be used.
    """

    def __init__(self, stores: Sequence[Store], check: Check, rank: int) -> None:
        self.stores, self.check, self.rank = stores, check, rank
        # By (number of the Store, step): the snapshots that were opened, and those that have a fault.
        self.opened: dict[tuple[int, int], Snapshot] = {}
        self.faulty: dict[tuple[int, int], Exception] = {}

    def offers(self) -> list[Offer]:
        """Return each Store's newest snapshot without a known fault, and the newer ones with their faults.

        A Store that cannot be listed offers step -1 with a fault. Raises the UserErrors of `Store.open`.
        """
        return [offer for number in range(len(self.stores)) for offer in self.offers_of(number)]

    def offers_of(self, number: int) -> Iterator[Offer]:
        store = self.stores[number]
        try:
            steps = store.possible_steps()
        except UnreadableSnapshot as error:
            self.reject(number, -1, error)
            steps = [-1]
        for step in steps:
            place = number, step
            if place not in self.opened.keys() | self.faulty.keys():
                try:
                    self.opened[place] = store.open(step, self.check)
                except BadSnapshot as error:
                    self.reject(number, step, error)
            manifest = self.opened[place].manifest if place in self.opened else None
            fault = self.faulty.get(place)
            is_corrupt = isinstance(fault, CorruptSnapshot)
            yield Offer(
                step, number == 0, store.url, self.rank, number, manifest, str(fault or ""), is_corrupt
            )
            if fault is None:
                return

    def reject(self, store: int, step: int, error: Exception) -> None:
        """From now on, offer the snapshot of `step` in Store number `store` only with the fault `error`."""
        self.faulty[store, step] = error
        if isinstance(error, UnreadableSnapshot):  # it is never deleted
            self.stores[store].unreadable.add(step)

    def verify(self, offer: Offer) -> Content | None:
        """Check all bytes of a snapshot that this rank has offered; return None if a check fails.

        Otherwise returns (tokenizer's bytes or None, [{tensor: type and shape} of each tensor file]).
        """
        snapshot = self.opened[offer.store, offer.step]
        try:
            self.stores[offer.store].verify(snapshot)
            tokenizer = snapshot.read_tokenizer()
        except BadSnapshot as error:
            self.reject(offer.store, offer.step, error)
            return None
        return tokenizer, [file.specs for file in snapshot.tensor_files]

    def state_of(self, offer: Offer, content: Content) -> "StoredState":
        """Return the StoredState of `offer`; `content` is what `verify` returned on rank `offer.reader`."""
        assert offer.manifest
        tokenizer, files = content
        shapes = {name: spec.shape for specs in files for name, spec in specs.items()}
        layouts = [lay_out("", specs) for specs in files]
        snapshot = self.opened[offer.store, offer.step] if offer.reader == self.rank else None
        return StoredState(offer.manifest, tokenizer, layouts, shapes, offer.reader, snapshot)


def choose(offers: Iterable[Offer], newest_on_disk: int | None) -> Offer | None:
    """Return the offer of the newest snapshot without a fault; None if there is none.

    A snapshot in memory does not count if its `after` (see Offer) is more than `newest_on_disk`, unless
    `newest_on_disk` is None. Of the same step, one on disk comes first, then that of the lowest rank.
    """
    usable = [
        offer
        for offer in offers
        if not offer.fault and (offer.is_on_disk or newest_on_disk is None or offer.after <= newest_on_disk)
    ]
    return max(usable, key=lambda one: (one.step, one.is_on_disk, -one.reader, -one.store), default=None)


@dataclass(frozen=True)
class StoredState:
    """A saved state that all ranks read together. Its tensors are float32.

    `files` has the layout of each tensor file, and `shapes` the shape of each tensor, by name. Rank `reader`
    reads `snapshot`; on all other ranks `snapshot` is None.
    """

    manifest: Manifest
    tokenizer: bytes | None  # the tokenizer's bytes; None: there is no tokenizer
    files: list[Layout]
    shapes: dict[str, Shape]
    reader: int
    snapshot: Snapshot | None

    def copy_into(
        self, parts: Mapping[str, Tensor], held: RowMap, rank: int, context: DistributedContext
    ) -> None:
        """Copy the saved rows into `parts`, this rank's tensors, by name. Collective.

        `rank` is this rank, and `held` says which rows of each tensor it holds. A file that has none of the
        tensors is not read. If a read fails, only the reader raises CorruptSnapshot or UnreadableSnapshot.
        """
        for number, file in enumerate(self.files):
            names = parts.keys() & file.begins.keys()
            for begin in range(len(file.header), file.size if names else 0, PIECE_BYTES):
                size = min(PIECE_BYTES, file.size - begin)
                piece = context.on_all(functools.partial(self.read, number, begin, size))  # may be slow
                context.transport.broadcast(piece, self.reader)
                for name in names:
                    copy_part(parts[name], held.first(name, rank), (begin - file.begins[name]) // 4, piece)

    def read(self, number: int, begin: int, size: int) -> Tensor:
        """Return `size` bytes of file `number`, from `begin` on, as float32. Only `reader` fills them."""
        piece = torch.empty(size // 4)
        if self.snapshot:
            self.snapshot.tensor_files[number].file.read_into(begin, memory_of(piece.view(torch.uint8)))
        return piece


@torch.no_grad()
def copy_part(part: Tensor, first: int, begin: int, elements: Tensor) -> None:
    """Copy the overlap of `part` and `elements`, two pieces of a longer vector, from `elements` to `part`.

    `part`, flattened, begins at index `first` of the longer vector, and `elements` at index `begin`, which
    may be negative.
    """
    low, high = max(first, begin), min(first + part.numel(), begin + len(elements))
    if low < high:
        part.view(-1)[low - first : high - first].copy_(elements[low - begin : high - begin])


@dataclass(frozen=True)
class Found:
    """The offers of the ranks, and the newest usable one, `choice`, whose bytes may not be checked yet."""

    choice: Offer | None  # None: no offer can be used
    url: str  # the folder or URL of the snapshots on disk
    offers: Sequence[Offer]

    @property
    def where(self) -> str:
        """The folder or URL of the chosen snapshot; without a choice, that of the snapshots on disk."""
        return self.choice.where if self.choice else self.url

    def on_disk(self, rank: int | None = None) -> list[Offer]:
        """Return the offers of `rank` (None: of all ranks) from a disk or URL, newest first."""
        offers = [one for one in self.offers if one.is_on_disk and rank in (None, one.reader)]
        return sorted(offers, key=lambda one: -one.step)

    def step_on_disk(self, rank: int | None = None) -> int:
        """Return the newest step without a fault that `rank` (None: any) offers from disk or URL, or -1."""
        return next((offer.step for offer in self.on_disk(rank) if not offer.fault), -1)

    def is_held_by(self, rank: int) -> bool:
        """Return whether `rank` offers a snapshot of the step of `choice`, without a known fault."""
        step = self.choice.step if self.choice else -1
        return any(one.step == step and one.reader == rank and not one.fault for one in self.offers)

    def unreadable(self) -> list[Offer]:
        """Return the offers from disk or URL with a fault that does not mean that a snapshot is corrupt.

        The snapshot or the whole Store (step -1) could not be read, or the snapshot is of a different job.
        """
        return [offer for offer in self.on_disk() if offer.fault and not offer.is_corrupt]

    def corrupt(self, rank: int) -> dict[int, str]:
        """Return {step: reason} for the corrupt snapshots among the offers of `rank` from disk or URL.

        A step is left out if any rank's offer of that step is among `unreadable`.
        """
        unreadable = {offer.step for offer in self.unreadable()}
        faulty = [offer for offer in self.on_disk(rank) if offer.is_corrupt]
        return {offer.step: offer.fault for offer in faulty if offer.step not in unreadable}


def find_valid(
    reader: Reader, context: DistributedContext, next_choice: Callable[[], Offer | None]
) -> StoredState | None:
    """Return, on all ranks, the state of the first choice whose bytes are valid; None if no choice is left.

    `next_choice` is called on all ranks, and must return the same offer on all. Each call after the first
    must exchange the Readers' offers anew, because an offer that proved bad now has a fault. Collective.
    """
    while choice := next_choice():
        content = context.on_rank(choice.reader, functools.partial(reader.verify, choice))
        if content:
            return reader.state_of(choice, content)
    return None
