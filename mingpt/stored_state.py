"""The state that a generation starts from: read by whoever can, handed over to all ranks piece by piece.

No rank ever holds more of it than its own part and one piece.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mingpt.config import Config
from mingpt.distributed import DistributedContext
from mingpt.snapshot import read_config
from mingpt.state import TrainState, copy_rows
from mingpt.weights import check_shapes

PIECE_BYTES = 16 << 20
POSITIONS = "model.wpe.weight"

Shape = tuple[int, ...]
Read = Callable[[str, int, int], Tensor]  # name, first row, row after the last: these rows


class Rows(NamedTuple):
    """Rows of a tensor that one rank can read; a scalar is one row."""

    name: str
    begin: int
    end: int
    rank: int


@dataclass(frozen=True)
class StoredState:
    """A snapshot, the same on all ranks, but for `read`."""

    manifest: dict[str, Any]
    shapes: dict[str, Shape]
    dtypes: dict[str, torch.dtype]
    rows: list[Rows]  # which together are all tensors
    read: Read  # for this rank's of them

    @functools.cached_property
    def config(self) -> Config:
        """The configuration of the run that wrote it."""
        return read_config(self.manifest)

    def tensor(self, name: str, context: DistributedContext) -> Tensor:
        """A whole tensor. Collective."""
        whole = torch.empty(self.shapes[name], dtype=self.dtypes[name])
        for _, begin, rows in self.stream([name], context):
            copy_rows(whole, 0, begin, rows)
        return whole

    def stream(self, names: Iterable[str], context: DistributedContext) -> Iterator[tuple[str, int, Tensor]]:
        """(name, first row, rows) of these tensors, on the CPU, valid until the next. Collective."""
        wanted = set(names)
        for pieces in self.batches(part for part in self.rows if part.name in wanted):
            sizes = [self.size(piece) for piece in pieces]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            source = pieces[0].rank
            parts = buffer.split(sizes) if context.rank == source else ()
            fill = functools.partial(self.fill, pieces, parts)
            context.run_with_heartbeat(fill)  # a store may be slow
            context.broadcast(buffer, source)
            for piece, part in zip(pieces, buffer.split(sizes), strict=True):
                rows = part.view(self.dtypes[piece.name]).view(-1, *self.shapes[piece.name][1:])
                yield piece.name, piece.begin, rows

    def fill(self, pieces: Sequence[Rows], parts: Sequence[Tensor]) -> None:
        """Read these rows, each into (n,) uint8, where there are any."""
        for piece, part in zip(pieces, parts, strict=False):
            rows = self.read(piece.name, piece.begin, piece.end)
            part.copy_(rows.reshape(-1).view(torch.uint8))

    def batches(self, parts: Iterable[Rows]) -> Iterator[list[Rows]]:
        """Runs of rows of one rank, of about PIECE_BYTES; many small tensors are one message."""
        batch: list[Rows] = []
        size = 0
        for part in parts:
            for piece in self.cut(part):
                if batch and (piece.rank != batch[0].rank or size + self.size(piece) > PIECE_BYTES):
                    yield batch
                    batch, size = [], 0
                batch.append(piece)
                size += self.size(piece)
        if batch:
            yield batch

    def cut(self, part: Rows) -> Iterator[Rows]:
        """Pieces of at most PIECE_BYTES, or of one row."""
        row_bytes = max(1, self.size(part) // max(1, part.end - part.begin))
        count = max(1, PIECE_BYTES // row_bytes)
        for begin in range(part.begin, part.end, count):
            yield Rows(part.name, begin, min(begin + count, part.end), part.rank)

    def size(self, part: Rows) -> int:
        """In bytes."""
        columns = torch.Size(self.shapes[part.name][1:]).numel()
        return (part.end - part.begin) * columns * self.dtypes[part.name].itemsize


def load_state(state: TrainState, stored: StoredState, context: DistributedContext) -> None:
    """Take over the weights, and the optimizer's state if it is of the same kind. Collective.

    Learned positions are cut to block_size. Raises UserError for the weights of another model.
    """
    parts, first, shapes = state.tensors(), state.first_rows(), state.shapes()
    names = [name for name in stored.shapes if name.startswith("model.")]
    there = {name: (stored.shapes[name], stored.dtypes[name]) for name in names}
    if POSITIONS in there and POSITIONS in shapes:
        (length, *columns), dtype = there[POSITIONS]
        there[POSITIONS] = (min(length, shapes[POSITIONS][0]), *columns), dtype
    here = {name: shape for name, shape in shapes.items() if name.startswith("model.")}
    check_shapes(there, here, f"the snapshot of step {stored.manifest['step']}")
    optimizer = [name for name in stored.shapes if name.startswith("optimizer.")]
    if set(optimizer) == {name for name in shapes if name.startswith("optimizer.")}:
        names += optimizer
    for name, begin, rows in stored.stream(names, context):
        copy_rows(parts[name], first[name], begin, rows)
