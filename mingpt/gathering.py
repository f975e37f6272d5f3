"""Writes a state whose rows lie on several ranks as files that do not show it.

Each file is written by one rank, which receives the bytes of the others in chunks; several ranks write at
once where all of them see one folder. All of it happens in background threads, over a process group of their
own: training exchanges messages meanwhile.
"""

import bisect
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt.snapshot import (
    FileLayout,
    FileRecord,
    SnapshotSaver,
    SnapshotStore,
    StagingBuffer,
    TensorSpec,
    Transfer,
    make_layout,
)
from mingpt.snapshot.saver import LateFields
from mingpt.snapshot.store import NO_ROOM

CHUNK_BYTES = 16 << 20
# Of a background exchange: a rank may write slowly meanwhile. One that is lost is noticed at once, one that
# is frozen by the training's own exchanges.
TIMEOUT = timedelta(hours=2)

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Bytes of a file, `begin` to `end`, that lie together on one rank, from `offset` of its part on."""

    begin: int
    end: int
    rank: int
    name: str
    offset: int


class BackgroundGroup:
    """A gloo process group of all ranks, for one background thread of each. Constructing it is collective."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.group = dist.new_group(backend="gloo", timeout=TIMEOUT)

    def all_gather_object(self, value: T) -> list[T]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def all_to_all(self, sent: Sequence[Tensor], received: Sequence[int]) -> list[Tensor]:
        """(n,) uint8 for each rank to those from each rank, whose sizes are `received`."""
        incoming = torch.empty(sum(received), dtype=torch.uint8)
        sizes = [len(part) for part in sent]
        dist.all_to_all_single(incoming, torch.cat(list(sent)), list(received), sizes, group=self.group)
        return list(incoming.split(list(received)))


class GatheringTransfer:
    """A saver's transfer of a sharded state; every rank has one. Methods are collective.

    `runs` tells where the bytes of each file are, beyond its header; `staging` holds this rank's. `writers`
    are the ranks that write files.
    """

    def __init__(
        self,
        layouts: Sequence[FileLayout],
        runs: Sequence[Sequence[Run]],
        staging: StagingBuffer,
        group: BackgroundGroup,
        writers: Sequence[int],
    ) -> None:
        self.layouts, self.runs, self.staging = layouts, runs, staging
        self.group, self.writers = group, writers

    def write_files(self, store: SnapshotStore, step: int) -> list[FileRecord]:
        """Raises on all ranks what a rank raises that cannot write."""
        records: list[FileRecord] = []
        error: Exception | None = None
        for first in range(0, len(self.layouts), len(self.writers)):
            batch = range(first, min(first + len(self.writers), len(self.layouts)))
            chunks = Draining(self.chunks(batch))
            try:
                records += self.write_own(store, batch, chunks)
            except Exception as problem:  # each driver raises exceptions of its own
                if chunks.is_broken:
                    raise  # a peer is lost
                error = error or problem
            chunks.drain()  # what this rank does not write it still has to send
        outcomes = self.group.all_gather_object((records, picklable(error)))
        for _, failure in outcomes:
            if failure is not None:
                raise failure
        by_name = {record.name: record for found, _ in outcomes for record in found}
        return [by_name[layout.name] for layout in self.layouts]

    def write_own(self, store: SnapshotStore, batch: range, chunks: "Draining") -> list[FileRecord]:
        mine = [number for number in batch if self.writer(number, batch) == self.group.rank]
        return [store.write_file(self.layouts[number], chunks) for number in mine]

    def writer(self, number: int, batch: range) -> int:
        """The rank that writes a file of the batch."""
        return self.writers[number - batch.start]

    def chunks(self, batch: range) -> Iterator[memoryview]:
        """The bytes of the file that this rank writes, in order, while it sends its parts of the others."""
        longest = max(self.layouts[number].size for number in batch)
        for begin in range(0, longest, CHUNK_BYTES):
            sent = [torch.empty(0, dtype=torch.uint8)] * self.group.world_size
            sizes, mine = [0] * self.group.world_size, None
            for number in batch:
                pieces = cut(self.runs[number], begin, begin + CHUNK_BYTES)
                writer = self.writer(number, batch)
                parts = [self.part(piece) for piece in pieces if piece.rank == self.group.rank]
                if parts:
                    sent[writer] = torch.cat(parts)
                if writer == self.group.rank:
                    mine = number, pieces
                    for piece in pieces:
                        sizes[piece.rank] += piece.end - piece.begin
            received = self.group.all_to_all(sent, sizes)
            if mine is not None and begin < self.layouts[mine[0]].size:
                yield self.assemble(self.layouts[mine[0]], begin, mine[1], received)

    def part(self, piece: Run) -> Tensor:
        """(n,) uint8, the bytes of a run on this rank."""
        size = piece.end - piece.begin
        whole = self.staging.slots[piece.name].view(-1).view(torch.uint8)
        return whole[piece.offset : piece.offset + size]

    def assemble(
        self, layout: FileLayout, begin: int, pieces: Sequence[Run], received: list[Tensor]
    ) -> memoryview:
        """A file's chunk from `begin` on, of what the ranks have sent of it."""
        chunk = torch.empty(min(CHUNK_BYTES, layout.size - begin), dtype=torch.uint8)
        header = bytearray(layout.header[begin : begin + CHUNK_BYTES])
        if header:
            chunk[: len(header)] = torch.frombuffer(header, dtype=torch.uint8)
        taken = [0] * self.group.world_size
        for piece in pieces:
            size, rank = piece.end - piece.begin, piece.rank
            first = piece.begin - begin
            chunk[first : first + size] = received[rank][taken[rank] : taken[rank] + size]
            taken[rank] += size
        return memoryview(chunk.numpy())  # type: ignore[arg-type]


class Draining:
    """An iterator that can be run to its end after its user has given up; `is_broken` if it raises itself."""

    def __init__(self, chunks: Iterator[memoryview]) -> None:
        self.chunks, self.is_broken = chunks, False

    def __iter__(self) -> "Draining":
        return self

    def __next__(self) -> memoryview:
        try:
            return next(self.chunks)
        except StopIteration:
            raise
        except Exception:
            self.is_broken = True
            raise

    def drain(self) -> None:
        for _ in self:
            pass


def picklable(error: Exception | None) -> Exception | None:
    """The error as other ranks can be told it."""
    try:
        pickle.dumps(error)
    except Exception:  # drivers put connections and the like into their exceptions
        return OSError(f"{type(error).__name__}: {error}")
    return error


def find_runs(
    layout: FileLayout,
    specs: Mapping[str, TensorSpec],
    rows_by_rank: Callable[[str], list[range] | None],
    main_rank: int,
) -> list[Run]:
    """Where the bytes of a file's tensors are; those that all ranks hold come from the main rank."""
    runs = []
    for name, begin in layout.begins.items():
        parts = rows_by_rank(name)
        if parts is None:
            runs.append(Run(begin, begin + specs[name].nbytes, main_rank, name, 0))
            continue
        row_bytes = specs[name].nbytes // specs[name].shape[0]
        runs += [
            Run(begin + rows.start * row_bytes, begin + rows.stop * row_bytes, rank, name, 0)
            for rank, rows in enumerate(parts)
        ]
    return sorted((run for run in runs if run.begin < run.end), key=lambda run: run.begin)


def cut(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """What lies between two bytes of the file, of runs in order."""
    first = bisect.bisect_right(runs, begin, key=lambda run: run.end)
    pieces = []
    for run in runs[first:]:
        if run.begin >= end:
            break
        low, high = max(begin, run.begin), min(end, run.end)
        pieces.append(Run(low, high, run.rank, run.name, run.offset + low - run.begin))
    return pieces


class ShardedSaver(SnapshotSaver):
    """A saver of which every rank has one. They save together; the main rank names the snapshot and prunes.

    `rows_by_rank` tells which rows of a tensor each rank holds, None for one that all ranks hold whole.
    """

    def __init__(
        self,
        store: SnapshotStore,
        keep_last: int,
        keep_best: bool,
        group: BackgroundGroup,
        main_rank: int,
        writers: Sequence[int],
        specs: Mapping[str, TensorSpec],
        rows_by_rank: Callable[[str], list[range] | None],
    ) -> None:
        super().__init__(store, keep_last, keep_best)
        self.group, self.main_rank, self.writers = group, main_rank, writers
        self.specs, self.rows_by_rank = specs, rows_by_rank

    def save(
        self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], late_fields: LateFields = dict
    ) -> None:
        self.wait()
        staging = self.allocate(tensors)
        staging.fill(tensors)
        self.start(manifest, self.make_transfer(manifest["step"], staging), late_fields)

    def make_transfer(self, step: int, staging: StagingBuffer) -> GatheringTransfer:
        layouts = make_layout(self.specs, step, self.part_bytes)
        runs = [find_runs(layout, self.specs, self.rows_by_rank, self.main_rank) for layout in layouts]
        return GatheringTransfer(layouts, runs, staging, self.group, self.writers)

    def write_making_room(self, manifest: dict[str, Any], transfer: Transfer) -> None:
        """Write a snapshot; while there is no room for it, remove an older one and try again. Collective."""
        step, is_written = manifest["step"], False
        while not is_written:
            self.on_main_rank(lambda: self.store.begin(step))
            try:
                records = transfer.write_files(self.store, step)
                is_written = True
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                removed = self.on_main_rank(lambda: self.remove_one_before(step))
                if removed is None:
                    raise
        self.on_main_rank(lambda: self.store.commit(manifest, records))

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises there, on all ranks. Collective."""
        result, error = None, None
        if self.group.rank == self.main_rank:
            try:
                result = work()
            except Exception as problem:  # each driver raises exceptions of its own
                error = problem
        result, error = self.group.all_gather_object((result, picklable(error)))[self.main_rank]
        if error is not None:
            raise error
        return result  # type: ignore[return-value]

    def prune(self) -> None:
        if self.group.rank == self.main_rank:
            super().prune()
