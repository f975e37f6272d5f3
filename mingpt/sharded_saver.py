"""The saver of a state whose rows lie on several ranks: all of them write together, or none."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

from mingpt.distributed.background_group import BackgroundGroup
from mingpt.errors import ClaimLost
from mingpt.gathering import GatheringTransfer, find_runs
from mingpt.snapshot import SnapshotSaver, SnapshotStore, StagingBuffer, TensorSpec, Transfer, make_layout
from mingpt.snapshot.saver import LateFields
from mingpt.snapshot.store import NO_ROOM

T = TypeVar("T")
log = logging.getLogger(__name__)


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

    def start(self, manifest: dict[str, Any], transfer: Transfer, late_fields: LateFields = dict) -> None:
        super().start(manifest, transfer, lambda: self.group.on_all_ranks(late_fields)[self.group.rank])

    def write_making_room(self, manifest: dict[str, Any], transfer: Transfer) -> None:
        """Write a snapshot; while there is no room for it, remove an older one and try again. Collective."""
        no_room = self.try_to_write(manifest, transfer)
        while no_room:
            removed = self.on_main_rank(lambda: self.remove_one_before(manifest["step"]))
            if removed is None:
                raise no_room
            log.warning(
                "snapshot of step %d is removed: there was no room for that of step %d",
                removed,
                manifest["step"],
            )
            no_room = self.try_to_write(manifest, transfer)

    def try_to_write(self, manifest: dict[str, Any], transfer: Transfer) -> OSError | None:
        """Write a snapshot; returns the error if there is no room for it. Nothing is left of a failure.

        A snapshot that is complete stays, even if a rank dies before all have heard of it.
        """
        step, is_committed = manifest["step"], False

        def commit() -> None:
            nonlocal is_committed
            self.store.commit(manifest, records)
            is_committed, self.newest_written = True, step

        try:
            self.on_main_rank(lambda: self.store.begin(step))
            records = transfer.write_files(self.store, step)
            self.on_main_rank(commit)
        except ClaimLost:
            raise
        except Exception as error:  # each driver raises exceptions of its own
            if self.group.rank == self.main_rank and not is_committed:
                self.store.discard(step)
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                return error
            raise
        return None

    def on_main_rank(self, work: Callable[[], T]) -> T:
        """What `work` returns or raises there, on all ranks. Collective."""
        is_main = self.group.rank == self.main_rank
        result = self.group.on_all_ranks(lambda: work() if is_main else None)[self.main_rank]
        return result  # type: ignore[return-value]

    def prune(self) -> None:
        if self.group.rank == self.main_rank:
            super().prune()
