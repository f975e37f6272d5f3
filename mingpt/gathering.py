"""Writes a state whose rows lie on several ranks as files that do not show it.

Each file is written by one rank, which receives the bytes of the others in chunks; several ranks write at
once where all of them see one folder. All of it happens in background threads, over a process group of their
own: training exchanges messages meanwhile.
"""

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mingpt.distributed.background_group import BackgroundGroup, picklable
from mingpt.errors import ClaimLost, SaveAborted
from mingpt.snapshot import (
    FileLayout,
    FileRecord,
    SnapshotStore,
    StagingBuffer,
    TensorSpec,
)
from mingpt.snapshot.store import NO_ROOM

CHUNK_BYTES = 16 << 20

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


class CannotWrite(Exception):
    """All ranks know that one of them could not write, and the reason."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(f"{type(reason).__name__}: {reason}")
        self.reason = reason

    @property
    def may_pass(self) -> bool:
        """Whether another attempt may succeed."""
        is_no_room = isinstance(self.reason, OSError) and self.reason.errno in NO_ROOM
        return not is_no_room and not isinstance(self.reason, (ClaimLost, SaveAborted))


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
        """Raises on all ranks what a rank raises that cannot write.

        Where the store is no folder, all files are written again first, after each of its pauses.
        """
        pauses_s = () if store.is_local else store.retries_s
        for pause_s in (*pauses_s, None):
            try:
                return self.write_files_once(store)
            except CannotWrite as failure:
                if pause_s is None or not failure.may_pass:
                    raise failure.reason from None
                if self.group.rank == self.writers[0]:
                    log.info("writing step %d to %s failed (%s) and is retried", step, store.url, failure)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def write_files_once(self, store: SnapshotStore) -> list[FileRecord]:
        """Raises CannotWrite on all ranks if one cannot write."""
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
        for _, error_there in outcomes:
            if error_there is not None:
                raise CannotWrite(error_there)
        by_name = {record.name: record for found, _ in outcomes for record in found}
        return [by_name[layout.name] for layout in self.layouts]

    def write_own(self, store: SnapshotStore, batch: range, chunks: "Draining") -> list[FileRecord]:
        mine = [number for number in batch if self.writer(number, batch) == self.group.rank]
        return [store.write_file(self.layouts[number], chunks) for number in mine]

    def writer(self, number: int, batch: range) -> int:
        """The rank that writes a file of the batch."""
        return self.writers[number - batch.start]

    def chunks(self, batch: range) -> Iterator[memoryview]:
        """The bytes of the file that this rank writes, in order, while it sends its parts of the others.

        The next chunk travels while this one is hashed and written.
        """
        longest = max(self.layouts[number].size for number in batch)
        for wait in one_ahead(self.exchange(batch, begin) for begin in range(0, longest, CHUNK_BYTES)):
            chunk = wait()
            if chunk is not None:
                yield chunk

    def exchange(self, batch: range, begin: int) -> Callable[[], memoryview | None]:
        """Begin to send the files' chunks from `begin` on; the result waits for that of this rank's file."""
        sent: list[list[Tensor]] = [[] for _ in range(self.group.world_size)]
        sizes, mine = [0] * self.group.world_size, None
        for number in batch:
            pieces = cut(self.runs[number], begin, begin + CHUNK_BYTES)
            writer = self.writer(number, batch)
            sent[writer] += [self.part(piece) for piece in pieces if piece.rank == self.group.rank]
            if writer == self.group.rank:
                mine = self.layouts[number], pieces
                for piece in pieces:
                    sizes[piece.rank] += piece.end - piece.begin
        wait = self.group.all_to_all(sent, sizes)

        def finish() -> memoryview | None:
            received = wait()
            if mine is None or begin >= mine[0].size:
                return None
            return self.assemble(mine[0], begin, mine[1], received)

        return finish

    def part(self, piece: Run) -> Tensor:
        """(n,) uint8, the bytes of a run on this rank."""
        size = piece.end - piece.begin
        whole = self.staging.slots[piece.name].view(-1).view(torch.uint8)
        return whole[piece.offset : piece.offset + size]

    def assemble(
        self, layout: FileLayout, begin: int, pieces: Sequence[Run], received: Sequence[Tensor]
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


def one_ahead(items: Iterator[T]) -> Iterator[T]:
    """The same items, each as soon as the one after it is made too."""
    held = list(itertools.islice(items, 1))
    for item in items:
        yield held.pop()
        held.append(item)
    yield from held


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
