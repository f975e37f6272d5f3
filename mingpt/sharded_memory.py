"""Writes a sharded state to the nodes' memory: each rank its part, and a copy of it on the next node.

So a killed worker costs a few steps, and so does a lost node. memory_search.py finds the parts again. A save
counts when all parts of it are written; nobody overwrites the one before until then.
"""

import logging
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mingpt import events
from mingpt.distributed import DistributedContext
from mingpt.distributed.background_group import BackgroundGroup, save_needs_peers
from mingpt.errors import SaveAborted, UserError
from mingpt.snapshot import MemorySnapshots, StagingBuffer, TensorSpec, specs_of
from mingpt.snapshot.memory import no_memory
from mingpt.snapshot.saver import LateFields
from mingpt.snapshot.slots import Slots, remove_quietly

PIECE_BYTES = 16 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copies:
    """Who keeps a copy of whose part: ranks of the next node, in turn. With one node there are none."""

    keeper: list[int | None]  # by the rank whose part it is

    @classmethod
    def plan(cls, node_of: Sequence[int]) -> "Copies":
        """`node_of`: the node of each rank. The first node is the next one of the last."""
        nodes = sorted(set(node_of))
        if len(nodes) < 2:
            return cls([None] * len(node_of))
        members = {node: [rank for rank, other in enumerate(node_of) if other == node] for node in nodes}
        keeper: list[int | None] = []
        for rank, node in enumerate(node_of):
            there = members[nodes[(nodes.index(node) + 1) % len(nodes)]]
            keeper.append(there[members[node].index(rank) % len(there)])
        return cls(keeper)

    def kept_by(self, rank: int) -> list[int]:
        """The ranks whose parts this one copies."""
        return [source for source, keeper in enumerate(self.keeper) if keeper == rank]


class ShardedMemory:
    """The snapshots in memory of a sharded state. Constructing it, `allocate` and `save` are collective.

    `specs` are those of the whole tensors that are sharded, `rows_by_rank` tells which rows of them each rank
    holds.
    """

    def __init__(
        self,
        memory: MemorySnapshots,
        context: DistributedContext,
        specs: Mapping[str, TensorSpec],
        rows_by_rank: Callable[[str], list[range] | None],
        shards_weights: bool,
    ) -> None:
        self.memory, self.context = memory, context
        self.specs, self.rows_by_rank = specs, rows_by_rank
        launch = context.launch
        places = context.all_gather_object((launch.node_rank, launch.local_rank))
        self.copies = Copies.plan([node for node, _ in places])
        self.own = memory.make_slots(f"-worker-{launch.local_rank}")
        self.kept: dict[int, Slots] = {}  # copies, by the rank whose part it is
        self.used = {f"node-{node}-worker-{worker}" for node, worker in places}
        for rank, keeper in enumerate(self.copies.keeper):
            if keeper is not None:
                self.used.add(f"node-{places[keeper][0]}-copy-{rank}")
        self.shard = {
            "rank": context.rank,
            "workers": context.world_size,
            "weights": shards_weights,
            "generation": context.new_run_id(),
        }
        self.group: BackgroundGroup | None = None  # of the copies, if any are made
        self.thread: threading.Thread | None = None
        self.error: OSError | UserError | None = None
        self.newest = 0  # step of the last save that was begun
        self.is_allocated = self.disabled = False

    def part_specs(self, rank: int) -> dict[str, TensorSpec]:
        """Of the rows that a rank holds."""
        specs = {}
        for name, spec in self.specs.items():
            rows = self.rows_by_rank(name)
            assert rows is not None, f"{name} is not sharded"
            specs[name] = TensorSpec(spec.dtype, (len(rows[rank]), *spec.shape[1:]))
        return specs

    def allocate(self, tensors: Mapping[str, Tensor], start_step: int | None = None) -> None:
        """Allocate room for two such states, and for two copies; then saving is only a copy.

        `start_step`: from which this generation starts; none past it is kept.
        """
        if self.is_allocated:
            return
        self.is_allocated = True
        problem = self.on_any_rank(self.make_room(start_step))  # all wait for it
        if not problem:
            problem = self.on_any_rank(try_open(self.own, specs_of(tensors), start_step))
        if problem:
            self.disable(problem)
            return
        if not any(keeper is not None for keeper in self.copies.keeper):
            return
        problem = self.open_copies(start_step)
        if problem and self.context.rank == 0:
            log.warning(
                "no copies of snapshots in memory on the next node: %s cannot be used (%s); after the loss "
                "of a node the run resumes from disk",
                self.memory.root.parent,
                problem,
            )
        if not problem:
            self.group = BackgroundGroup(self.context.rank, self.context.world_size)

    def on_any_rank(self, problem: str | None) -> str | None:
        """The first rank's that has one. Collective."""
        return next(filter(None, self.context.all_gather_object(problem)), None)

    def make_room(self, start_step: int | None) -> str | None:
        """Remove what other numbers of workers have left; why it cannot be done, if so."""
        try:
            if self.context.launch.local_rank == 0 and start_step is not None:
                self.memory.trim(start_step, self.used)
        except OSError as error:
            return str(error)
        return None

    def open_copies(self, start_step: int | None) -> str | None:
        """Allocate what this rank keeps of others; why some rank has no room, if so. Collective."""
        problem = None
        for rank in self.copies.kept_by(self.context.rank):
            self.kept[rank] = self.memory.make_slots(f"-copy-{rank}")
            problem = problem or try_open(self.kept[rank], self.part_specs(rank), start_step)
        problem = self.on_any_rank(problem)
        if problem:
            self.remove_slots(self.kept)
            self.kept = {}
        return problem

    def save(
        self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], late_fields: LateFields = dict
    ) -> None:
        """Copy the parts, and write manifests and copies in the background.

        Skipped on all ranks if any has not finished the last one: it would overwrite the one before.
        """
        self.allocate(tensors)
        if self.disabled or not self.is_free():
            return
        if self.newest and self.context.launch.local_rank == 0:
            self.remove_outdated(self.newest)
        self.newest = manifest["step"]
        try:
            for slots in (self.own, *self.kept.values()):
                slots.begin()
        except OSError as error:
            self.error = error  # this rank commits nothing, and sends its part all the same
        self.own.fill(tensors)
        self.thread = threading.Thread(target=self.finish, args=(manifest, late_fields))
        self.thread.start()

    def is_free(self) -> bool:
        """Whether all ranks have finished the last save. If one could not, there are none from now on."""
        is_busy = bool(self.thread and self.thread.is_alive())
        flags = torch.tensor([float(is_busy), float(self.error is not None)])
        busy, failed = self.context.all_reduce(flags).tolist()
        if failed and not busy:
            problem = self.on_any_rank(str(self.error) if self.error else None)
            self.disable(problem or "a worker cannot write")
            return False
        return not busy

    def finish(self, manifest: dict[str, Any], late_fields: LateFields) -> None:
        """In the background: checksums, manifests, and the copies."""
        events.emit("write_start", kind="memory", step=manifest["step"])
        try:
            manifest = manifest | late_fields()
            part = self.own.buffer
            self.commit(self.own, manifest, self.context.rank)
            self.exchange_copies(part)
            for rank, slots in self.kept.items():
                self.commit(slots, manifest, rank)
        except SaveAborted:
            return  # the main thread loses the same peer, and reports it
        if self.error is None:
            events.emit("write_end", kind="memory", step=manifest["step"])

    def commit(self, slots: Slots, manifest: dict[str, Any], rank: int) -> None:
        """Unless something has failed. The others count on this rank's messages, and learn of it later."""
        if self.error is None:
            try:
                slots.commit(manifest | {"shard": self.shard | {"rank": rank}})
            except (OSError, UserError) as error:
                self.error = error

    def exchange_copies(self, part: StagingBuffer) -> None:
        """Send this rank's part to its keeper, and receive what it keeps of others, piece by piece.

        Raises SaveAborted if one of them is gone.
        """
        keeper = self.copies.keeper[self.context.rank]
        if self.group is None or keeper is None:
            return
        group = self.group.group
        sent = pieces(part, self.specs)
        received = {rank: pieces(slots.buffer, self.specs) for rank, slots in self.kept.items()}
        is_over = False
        while not is_over:
            piece = next(sent, None)
            incoming = [(rank, next(parts, None)) for rank, parts in received.items()]
            with save_needs_peers():
                work = [] if piece is None else [dist.isend(piece, keeper, group=group)]
                work += [dist.irecv(part, rank, group=group) for rank, part in incoming if part is not None]
                for one in work:
                    assert one is not None
                    one.wait()
            is_over = not work

    def remove_outdated(self, step: int) -> None:
        """As MemorySnapshots does, on the first worker of each node. Not collective."""
        self.memory.remove_outdated(step, self.used)

    def disable(self, reason: str) -> None:
        """On all ranks: there are no snapshots in memory. Rank 0 says so."""
        self.disabled = True
        if self.context.rank == 0:
            log.warning("%s", no_memory(self.memory.root.parent, reason))
        self.own.remove()
        self.remove_slots(self.kept)

    def remove_slots(self, kept: Mapping[int, Slots]) -> None:
        for slots in kept.values():
            slots.remove()

    def remove(self) -> None:
        """Remove this run's snapshots from memory; all ranks do. Not collective."""
        if self.thread:
            self.thread.join()
        self.own.remove()
        self.remove_slots(self.kept)
        root = self.memory.root
        if self.context.launch.local_rank == 0:
            for path in folders_in(root):
                if path.name not in self.used:
                    remove_quietly(path)
        # Whoever is the last one on this machine succeeds.
        if not folders_in(root):
            shutil.rmtree(root, ignore_errors=True)


def folders_in(root: Path) -> list[Path]:
    """What workers have there; nothing where another one, the last, has just removed it."""
    try:
        return list(root.glob("node-*"))
    except FileNotFoundError:
        return []


def try_open(slots: Slots, specs: Mapping[str, TensorSpec], start_step: int | None) -> str | None:
    """Why there is no room for two such states."""
    try:
        slots.open(specs, start_step)
    except OSError as error:
        size_mb = sum(spec.nbytes for spec in specs.values()) / 1e6
        return f"{error.strerror} for 2 x {size_mb:.1f} MB per worker"
    return None


def pieces(buffer: StagingBuffer, specs: Mapping[str, TensorSpec]) -> Iterator[Tensor]:
    """The bytes of these tensors, at most PIECE_BYTES at a time."""
    for name in specs:
        begin, end = buffer.ranges[name]
        yield from (piece for piece in buffer.buffer[begin:end].split(PIECE_BYTES) if len(piece))
