"""Frequent snapshots in the nodes' memory, so that a killed worker costs only a few steps.

These are ordinary snapshots, written to a folder such as /dev/shm, whose files outlive the workers but not
the node. This folder has one subfolder for each run, named after the random id in run.json and the path of
the run folder. In the run's subfolder, each rank that saves writes to its own folder. A later generation (the
workers after a restart) writes to new folders.

If each rank holds the whole state, the first worker of each node writes the state. A sharded state is written
in parts, one per rank; each part is a snapshot whose manifest has the field `shard`. If there are several
nodes, a worker of the next node writes a copy of each part's sharded rows to a separate folder. The loss of a
whole node then also costs only a few steps. Training goes on while the parts are written.

A save counts when all its parts are written. Until then the previous save is kept, so the memory must have
room for two saves. When a run is complete, its snapshots in memory are removed. If the folder cannot be used,
snapshots are saved only on disk.
"""

import contextlib
import errno
import hashlib
import logging
import os
import platform
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mingpt.base.files import reason_of, remove_quietly
from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext
from mingpt.distributed.exit import is_lost_peer
from mingpt.distributed.group import BackgroundGroup
from mingpt.snapshot.layout import TensorSpec, is_snapshot_file, make_layout, step_of
from mingpt.snapshot.manifest import Manifest, ShardFields
from mingpt.snapshot.saver import Keep, SnapshotSaver, Transfer
from mingpt.snapshot.store import SnapshotStore

LEFTOVER_S = 24 * 3600.0
RUN_NAME = re.compile(r"mingpt-[0-9a-f]{32}-[0-9a-f]{8}")  # of a run's folder
RANK_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+(-copy)?")  # of a folder that a rank writes to
log = logging.getLogger(__name__)


class MemorySnapshots:
    """The folders on this machine, under `path` (such as /dev/shm), that hold a run's snapshots in memory."""

    def __init__(self, path: str, run_id: str, run_dir: Path) -> None:
        # A copy of a run folder is another run with the same id.
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.root = Path(path) / f"mingpt-{run_id}-{place}"

    def folders(self) -> list[Path]:
        """Return this run's folders of snapshots on this machine, of all ranks and generations, sorted."""
        return rank_folders(self.root)

    def stores(self) -> list[SnapshotStore]:
        return [SnapshotStore(str(path)) for path in self.folders()]

    def make_room(self, step: int) -> None:
        """Remove the run's snapshots on this machine, except those of the newest saved step up to `step`.

        Call this before a generation starts from `step`, while no worker is saving. If `step` is -1, all
        snapshots are removed.
        """
        stores = self.stores()
        kept = max((found for store in stores for found in store.steps() if found <= step), default=None)
        for store in stores:
            for name in filter(is_snapshot_file, store.names()):
                if kept is None or step_of(name) != kept:
                    store.remove_file(name)

    def remove_leftovers(self) -> None:
        """Remove the snapshots of other runs whose folders `is_leftover` accepts; log a line for each run."""
        for root in self.root.parent.glob("mingpt-*"):
            if root != self.root and is_leftover(root):
                log.warning(f"removing {root} from memory: another run left it more than a day ago")
                remove_run(root)


def is_private(folder: Path) -> bool:
    """Return whether `folder` belongs to this user, and no other user can write there. False for a link.

    The name of a run's folder can be guessed, so another user may have made a folder or a link of that name.
    """
    try:
        status = folder.lstat()
    except OSError:
        return False
    is_closed = not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(status.st_mode) and is_closed and status.st_uid == os.getuid()


def rank_folders(root: Path) -> list[Path]:
    """Return the folders of snapshots in a run's folder, sorted; [] if `is_private(root)` is false."""
    if not is_private(root):
        return []
    return sorted(path for path in root.glob("*") if RANK_NAME.fullmatch(path.name) and path.is_dir())


def remove_run(root: Path, belongs: Callable[[str], bool] = lambda name: True) -> None:
    """Remove those folders of snapshots in a run's folder whose names `belongs` accepts.

    Only files of snapshots are removed, and then the folders that are empty. So whatever a user has put there
    stays. Errors are ignored. Does nothing if `is_private(root)` is false.
    """
    if not is_private(root):
        return
    for folder in rank_folders(root):
        if belongs(folder.name):
            with contextlib.suppress(OSError):
                for path in folder.iterdir():
                    if is_snapshot_file(path.name):
                        remove_quietly(path)
                folder.rmdir()
    with contextlib.suppress(OSError):  # other workers of this machine have folders there
        root.rmdir()


def is_leftover(root: Path) -> bool:
    """Return whether `root` is a run's folder with snapshots in which nothing has changed for a day.

    Returns False if the folder is not this user's, and if files disappear during this call.
    """
    if not RUN_NAME.fullmatch(root.name) or not rank_folders(root):
        return False
    try:
        newest_change = max(path.lstat().st_mtime for path in (root, *root.rglob("*")))
    except FileNotFoundError:
        return False  # another job is removing it or writing there
    return newest_change < time.time() - LEFTOVER_S


def plan_copies(node_of: Sequence[int]) -> list[int | None]:
    """Return, for each rank, which rank keeps a copy of its part of a sharded state.

    `node_of` has the node of each rank. The parts of a node's ranks are given in turn to the ranks of the
    next node; the last node is followed by the first. With a single node there are no copies: the result has
    only None.
    """
    nodes = sorted(set(node_of))
    if len(nodes) < 2:
        return [None] * len(node_of)
    members = {node: [rank for rank, other in enumerate(node_of) if other == node] for node in nodes}
    keepers: list[int | None] = []
    for rank, node in enumerate(node_of):
        there = members[nodes[(nodes.index(node) + 1) % len(nodes)]]
        keepers.append(there[members[node].index(rank) % len(there)])
    return keepers


class MemorySaver:
    """Saves the state to memory: each rank writes its part.

    With several nodes, a rank of the next node also writes a copy of the sharded rows in each part. `rows`
    says which rows of each tensor each rank holds. If the state is not sharded, only the first worker of each
    node may call `save`, and no copies are made. `generation` is a random id, the same on all ranks and
    different in each generation (the workers between two restarts). `tokenizer` has the bytes of the
    tokenizer that is written with this rank's part (None: none is written). Only `write`, and what `write`
    calls, runs in a background thread.
    """

    def __init__(
        self,
        snapshots: MemorySnapshots,
        context: DistributedContext,
        rows: RowMap,
        generation: str,
        tokenizer: bytes | None = None,
    ) -> None:
        self.snapshots, self.rows, self.launch = snapshots, rows, context.launch
        self.generation = generation
        # The ranks that save together: all ranks if the state is sharded, else only this one.
        self.peers = context if rows.sharded else BackgroundGroup(0, 1)
        self.rank = self.peers.rank
        # For each rank, the rank that keeps a copy of its part, or None.
        self.keepers = plan_copies([place.node_rank for place in context.places]) if rows.sharded else [None]
        # `own` writes this rank's part. `savers` has `own` and the savers that write the copies which this
        # rank keeps, by the rank whose part a saver writes.
        self.own = self.make_saver(f"{context.rank}", tokenizer)
        self.savers = {self.rank: self.own}
        for rank, keeper in enumerate(self.keepers):
            if keeper == self.rank:
                self.savers[rank] = self.make_saver(f"{rank}-copy")
        self.group: BackgroundGroup | None = None  # sends and receives the copies; None if there are none
        self.thread: threading.Thread | None = None
        self.problem: str | None = None  # why this rank cannot write; None if nothing failed
        self.newest = 0  # step of the last save that was begun; 0 for none
        self.disabled = False

    def make_saver(self, suffix: str, tokenizer: bytes | None = None) -> SnapshotSaver:
        folder = self.snapshots.root / f"{self.generation}-{suffix}"
        return SnapshotSaver(SnapshotStore(str(folder)), tokenizer)

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the staging buffer, and create the folders.

        The buffer is for tensors with the names, types and shapes of `tensors`. If a folder cannot be
        created, or a node's memory has no room for two saves with copies, saving to memory is disabled. This
        holds for all ranks if the state is sharded, else only for that node. A second call does nothing.
        Collective if the state is sharded.
        """
        if self.own.staging or self.disabled:
            return
        nbytes = self.own.allocate(tensors).buffer.nbytes
        for rank in self.savers.keys() - {self.rank}:
            nbytes += sum(spec.nbytes for spec in self.part_specs(rank).values())
        node = self.launch.node_rank
        sizes = self.peers.all_gather_object((node, nbytes))
        try:
            self.create_folders(2 * sum(size for other, size in sizes if other == node))
        except OSError as error:
            self.note_problem(error)
        if self.is_free() and self.keepers[self.rank] is not None:
            self.group = BackgroundGroup(self.rank, len(self.keepers))

    def create_folders(self, needed: int) -> None:
        """Create this rank's folders.

        Raises OSError if a folder cannot be created, if `is_private` is false for the run's folder, or if
        there is no room for `needed` bytes. The space that older snapshots of the run take counts as room,
        because new snapshots replace the older ones.
        """
        root = self.snapshots.root
        root.mkdir(mode=0o700, exist_ok=True)
        if not is_private(root):
            raise OSError(errno.EPERM, f"{root.name} there is a link, or another user can write to it")
        for saver in self.savers.values():
            Path(saver.store.url).mkdir(exist_ok=True)
        used = sum(path.stat().st_size for path in root.rglob("step_*"))
        if shutil.disk_usage(root).free + used < needed:
            raise OSError(errno.ENOSPC, f"No space left for two states, {needed / 1e6:.1f} MB")

    def note_problem(self, error: Exception) -> None:
        self.problem = f"{reason_of(error)}, on {platform.node()}"

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensor]) -> None:
        """Copy this rank's tensors to the staging buffer, and write them to memory in the background.

        On return the tensors may change. The background thread also receives and writes the copies of other
        ranks' parts that this rank keeps. If any rank that saves with this rank is still writing the previous
        save, all these ranks skip this save. After a failed write, a later call disables saving. Collective
        if the state is sharded.
        """
        self.allocate(tensors)
        if self.disabled or not self.is_free():
            return
        is_first, self.newest = not self.newest, manifest.step
        transfer = self.own.stage(manifest.step, tensors)
        self.thread = threading.Thread(target=self.write, args=(manifest, transfer, is_first))
        self.thread.start()

    def is_free(self) -> bool:
        """Return whether a save may begin: no rank that saves with this one is writing or has failed.

        If the state is sharded, all ranks save together; else this rank saves by itself. If no rank is still
        writing, but one has failed, all these ranks call `disable`. Collective if the state is sharded.
        """
        is_busy = bool(self.thread and self.thread.is_alive())
        states = self.peers.all_gather_object((is_busy, self.problem))
        if any(busy for busy, _ in states):
            return False
        problem = next((problem for _, problem in states if problem), None)
        if problem:
            self.disable(problem)
        return not problem

    def write(self, manifest: Manifest, transfer: Transfer, is_first: bool) -> None:
        """Write this rank's part, send its sharded rows if copies are made, and write copies of other parts.

        `save` runs this in a background thread. `transfer` has the bytes of this rank's part, and `is_first`
        is true in the generation's first save. Before any later save, the first worker of each node removes
        the folders of earlier generations, because the generation's first save is complete by then. If
        another rank is gone, stops and sets `problem`.
        """
        try:
            if not is_first and self.launch.local_rank == 0:
                remove_run(self.snapshots.root, lambda name: not name.startswith(self.generation))
            sent = []
            if self.group:
                sending = self.plan_copy(self.rank, manifest.step)
                sending.exchange()
                sent = sending.sent
            for rank, saver in self.savers.items():
                of_part = transfer if saver == self.own else self.plan_copy(rank, manifest.step)
                self.write_part(saver, rank, manifest, of_part)
            self.own.group.wait(sent)
        except RuntimeError as error:
            if not is_lost_peer(error):
                raise
            self.note_problem(error)  # all ranks learn of this, unless the main thread loses the same peer

    def write_part(self, saver: SnapshotSaver, rank: int, manifest: Manifest, transfer: Transfer) -> None:
        """Write the part of rank `rank` with `saver`, after removing older snapshots from the saver's folder.

        The newest snapshot in the folder is kept. `transfer` has or receives the part's bytes. Raises only
        the error of a lost peer. Any other error is kept in `problem`, and `is_free` later reports it to
        every rank that takes part in the save.
        """
        if self.rows.sharded:
            shard = ShardFields(
                rank=rank,
                workers=self.rows.workers,
                weights="model." in self.rows.sharded,
                generation=self.generation,
            )
            manifest = manifest.model_copy(update={"shard": shard})
        try:
            saver.prune(Keep(last=1))
            saver.write_once(manifest, transfer)
        except Exception as error:  # of any kind: training goes on without snapshots in memory
            if is_lost_peer(error):
                raise
            self.note_problem(error)
            transfer.exchange()  # the rank that sends waits for this

    def part_specs(self, rank: int) -> dict[str, TensorSpec]:
        """Return the type and shape of the rows that `rank` holds of each sharded tensor, by tensor name."""
        assert self.own.staging, "allocate comes first"
        return {
            name: TensorSpec(slot.dtype, (len(self.rows.of(name, rank)), *slot.shape[1:]))
            for name, slot in self.own.staging.slots.items()
            if self.rows.by_rank(name)
        }

    def plan_copy(self, rank: int, step: int) -> Transfer:
        """Return the Transfer that sends the sharded rows of `rank` to the rank that keeps a copy of them."""
        specs, keeper = self.part_specs(rank), self.keepers[rank]
        assert self.group and self.own.staging and keeper is not None
        return Transfer(
            make_layout(specs, step),
            self.own.staging,
            sources=lambda name: [(rank, specs[name].nbytes)],  # all bytes come from one rank
            group=self.group,
            writer=keeper,
        )

    def disable(self, problem: str) -> None:
        """Call `remove`, and save no more to memory.

        All ranks that save together call this; the first of them logs the reason, `problem`.
        """
        self.disabled = True
        if self.rank == 0:
            log.warning(
                f"no snapshots in memory: {self.snapshots.root.parent} cannot be used ({problem}); after a "
                "kill the run resumes from disk"
            )
        self.remove()

    def remove(self) -> None:
        """Wait until the background write has ended, and remove this rank's snapshots from memory.

        Call this on all ranks that save to memory. Each rank removes its own snapshots and the copies that it
        keeps. The first worker of a node also removes the snapshots of earlier generations.
        """
        if self.thread:
            self.thread.join()
        own = {Path(saver.store.url).name for saver in self.savers.values()}
        is_first = self.launch.local_rank == 0
        remove_run(
            self.snapshots.root,
            lambda name: name in own or (is_first and not name.startswith(self.generation)),
        )
