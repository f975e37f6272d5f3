"""Frequent snapshots in the nodes' memory, so that a killed worker costs a few steps at most.

They lie in a folder such as /dev/shm, which outlives the workers but not the node. In it, the folder of a run
is named after the random id in run.json and the run folder's path. If each rank holds the whole state, the
first worker of each node writes it. A sharded state is written in parts, one per rank, and each part is
copied to the next node, so that a lost node costs a few steps, too. Training waits while the state is copied
once; checksums and the copies on the next node follow in the background. An orderly end removes the
snapshots, at the latest when the agent ends. If the folder is absent or too small, one line says so, and
snapshots are saved on disk alone.
"""

import glob
import hashlib
import itertools
import logging
import os
import platform
import shutil
import threading
import time
import uuid
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.base.files import reason_of
from mingpt.distributed.background_group import BackgroundGroup
from mingpt.distributed.exit import is_lost_peer
from mingpt.snapshot.layout import StagingBuffer, TensorSpec, step_of
from mingpt.snapshot.manifest import Manifest, ShardFields
from mingpt.snapshot.saver import LateFields, Sharding
from mingpt.snapshot.slots import Process, Slots, read_owner, remove_folder, this_process
from mingpt.snapshot.store import SnapshotStore

LEFT_TO_AGENT = "left-to-agent"  # a file in a folder of snapshots, until the next generation opens that
LEFTOVER_S = 24 * 3600.0
log = logging.getLogger(__name__)


class MemorySnapshots:
    """The folders on this machine, under `path`, with a run's snapshots in memory.

    The workers of a node write to the folders named after that node, and read the folders of all nodes.
    `owner` is the node's agent (torchrun's process), by default this process.
    """

    def __init__(
        self, path: str, run_id: str, run_dir: Path, node_rank: int, owner: Process | None = None
    ) -> None:
        # A copy of a run folder is another run with the same id.
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.root = Path(path) / f"mingpt-{run_id}-{place}"
        self.node_rank = node_rank
        self.owner = owner or this_process()  # the agent on this node

    def make_slots(self, suffix: str) -> Slots:
        """Return the Slots, not yet opened, for two snapshots in this node's folder with this suffix."""
        return Slots(self.root / f"node-{self.node_rank}{suffix}", self.owner)

    def folders(self) -> list[Path]:
        """Return the run's folders on this machine, those of all nodes; an empty list if there are none."""
        return [self.root / name for name in sorted(glob.glob("node-*", root_dir=self.root))]

    def stores(self) -> list[SnapshotStore]:
        return [SnapshotStore(str(path)) for path in self.folders()]

    def remove_newer(self, step: int) -> None:
        """Remove this run's snapshots on this machine past `step`, from which the job starts; -1 for all."""
        for path in self.folders():
            store = SnapshotStore(str(path))
            for newer in store.steps():
                if newer > step:
                    store.remove(newer)

    def remove_leftovers(self) -> None:
        """Remove the folders of other runs for which `is_leftover` is true, with a log line for each."""
        for root in self.root.parent.glob("mingpt-*"):
            if root != self.root and is_leftover(root):
                remove_folder(root, "another run left it more than a day ago")

    def unused_folders(self, used: Container[str]) -> list[SnapshotStore]:
        """Return the stores in this run's folders that no worker writes to any more.

        `used` has the names of the folders that this node's workers write to. Another folder is unused if its
        owner is this node's agent, has ended, or is not known.
        """
        found = []
        for path in self.folders():
            owner = read_owner(path)
            is_ours = owner is None or owner == self.owner or owner.is_alive() is False
            if is_ours and path.name not in used:
                found.append(SnapshotStore(str(path)))
        return found


def is_leftover(root: Path) -> bool:
    """Return whether a run's folder is this user's, unchanged for a day, and no known agent may be alive."""
    try:
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            return False
        owners = [read_owner(path) for path in root.glob("node-*")]
        newest_change = max(path.stat().st_mtime for path in (root, *root.rglob("*")))
    except FileNotFoundError:
        return False  # another job is removing it or writing there
    is_in_use = any(owner is not None and owner.is_alive() is not False for owner in owners)
    return not is_in_use and newest_change < time.time() - LEFTOVER_S


def remove_after_end(path: Path, which: str = "") -> None:
    """Remove the folder in `path` of each run whose agent on a node is this process. Raises nothing.

    With LEFT_TO_AGENT, only if `leave_to_agent` was called, and no generation has begun since.
    """
    for folder in path.glob("mingpt-*/node-*"):
        if read_owner(folder) == this_process() and (folder / which).exists():
            shutil.rmtree(folder.parent, ignore_errors=True)


def plan_copies(node_of: Sequence[int]) -> list[int | None]:
    """Return, for each rank, the rank that keeps a copy of its part: the next node's ranks, taken in turn.

    `node_of` has the node of each rank. After the last node comes the first. On a single node all are None.
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
    """Saves a state to memory: each rank writes its part, and a rank on the next node keeps a copy of it.

    A save counts when all its parts are written; until then no rank overwrites the save before. A state that
    is not sharded is saved by this rank alone, without a copy. Constructing a saver is collective.
    """

    def __init__(
        self, snapshots: MemorySnapshots, sharding: Sharding, tokenizer: bytes | None = None
    ) -> None:
        self.snapshots, self.sharding = snapshots, sharding
        self.own = snapshots.make_slots(f"-worker-{sharding.local_rank}")
        self.own.tokenizer = tokenizer
        self.kept: dict[int, Slots] = {}  # copies of other ranks' parts, by that rank
        places = sharding.all_gather_object((snapshots.node_rank, self.own.folder.name))
        # For each rank, the rank that keeps a copy of its part, or None.
        self.keepers = plan_copies([node for node, _ in places])
        # The names of the folders that this node's workers write to; earlier generations may leave others.
        self.used = {folder for node, folder in places if node == snapshots.node_rank}
        for rank, keeper in enumerate(self.keepers):
            if keeper is not None and places[keeper][0] == snapshots.node_rank:
                self.used.add(f"node-{snapshots.node_rank}-copy-{rank}")
        self.generation = sharding.all_gather_object(uuid.uuid4().hex)[0]
        self.group: BackgroundGroup | None = None  # for the copies, if any are made
        self.thread: threading.Thread | None = None
        self.problem: str | None = None  # why this rank cannot write
        self.newest = 0  # step of the last save that was begun
        self.disabled = False

    def allocate(self, tensors: Mapping[str, Tensor], start_step: int | None = None) -> None:
        """Allocate two buffers for states like `tensors`, and two for each part this rank keeps a copy of.

        `start_step` is the step from which this generation starts. Of earlier generations' snapshots in a
        folder, only the newest up to that step stays (None: the newest of all). If any rank has no room for
        its states, saving is disabled on all ranks. A second call does nothing. Collective.
        """
        if self.own.buffers or self.disabled:
            return
        problem = self.on_any_rank(self.make_room(start_step))  # all ranks wait until there is room
        if not problem:
            problem = self.on_any_rank(self.try_open(self.own, tensors, start_step))
        if problem:
            self.disable(problem)
        elif any(keeper is not None for keeper in self.keepers):
            self.open_copies(start_step)

    def on_any_rank(self, problem: str | None) -> str | None:
        """Return the problem, and its host, of the first rank that has one; None if none has. Collective."""
        named = problem and f"{problem}, on {platform.node()}"
        return next(filter(None, self.sharding.all_gather_object(named)), None)

    def make_room(self, start_step: int | None) -> str | None:
        """On a node's first worker, remove old snapshots from the folders that no worker writes to.

        In each folder the newest one up to `start_step` is kept. If `start_step` is None, nothing is removed.
        Returns the text of an OSError; None if there is none.
        """
        if self.sharding.local_rank > 0 or start_step is None:
            return None
        try:
            for store in self.snapshots.unused_folders(self.used):
                kept = max((step for step in store.steps() if step <= start_step), default=None)
                for name in store.names():
                    if kept is None or step_of(name) != kept:
                        store.remove_file(name)
        except OSError as error:
            return str(error)
        return None

    def try_open(
        self, slots: Slots, tensors: Mapping[str, Tensor] | Mapping[str, TensorSpec], start_step: int | None
    ) -> str | None:
        """Open `slots` for states like `tensors`; return a text if there is no room for them, else None."""
        try:
            slots.open(tensors, start_step)
        except OSError as error:
            size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            return f"{reason_of(error)}: {slots.folder.name} takes 2 x {size_mb:.1f} MB"
        return None

    def open_copies(self, start_step: int | None) -> None:
        """Allocate room for the copies that this rank keeps. Collective.

        If any rank has no room, no rank makes copies.
        """
        problem = None
        for rank in [rank for rank, keeper in enumerate(self.keepers) if keeper == self.sharding.rank]:
            self.kept[rank] = self.snapshots.make_slots(f"-copy-{rank}")
            problem = problem or self.try_open(self.kept[rank], self.part_specs(rank), start_step)
        problem = self.on_any_rank(problem)
        if not problem:
            self.group = BackgroundGroup(self.sharding.rank, self.sharding.world_size)
            return
        self.remove_copies()
        if self.sharding.rank == 0:
            log.warning(
                f"no copies of snapshots in memory on the next node: {self.snapshots.root.parent} cannot be "
                f"used ({problem}); after the loss of a node the run resumes from disk"
            )

    def part_specs(self, rank: int) -> dict[str, TensorSpec]:
        """Return, by name, the types and shapes of a rank's rows of the sharded tensors."""
        specs = {}
        for name, spec in self.sharding.specs.items():
            rows = self.sharding.rows_by_rank(name)
            if rows:
                specs[name] = TensorSpec(spec.dtype, (len(rows[rank]), *spec.shape[1:]))
        return specs

    def save(self, manifest: Manifest, tensors: Mapping[str, Tensor], late_fields: LateFields = dict) -> None:
        """Copy the tensors that this rank holds, and write manifests and copies in the background.

        On return the tensors may change. The background thread adds the fields that `late_fields` returns to
        the manifest. If any rank has not finished the last save, all ranks skip this one: it would overwrite
        the only complete save. A failed write disables saving at the next call. Collective.
        """
        self.allocate(tensors)
        if self.disabled or not self.is_free():
            return
        if self.newest and self.sharding.local_rank == 0:
            self.remove_outdated(self.newest)
        self.newest = manifest.step
        try:
            for slots in (self.own, *self.kept.values()):
                slots.begin()
        except OSError as error:
            self.problem = str(error)
        self.own.buffer.fill(tensors)
        self.thread = threading.Thread(target=self.finish, args=(manifest, late_fields))
        self.thread.start()

    def is_free(self) -> bool:
        """Return whether no rank is saving and none has failed; a failure disables saving. Collective."""
        is_busy = bool(self.thread and self.thread.is_alive())
        states = self.sharding.all_gather_object((is_busy, self.problem))
        if any(busy for busy, _ in states):
            return False
        problem = next((problem for _, problem in states if problem), None)
        if problem:
            self.disable(problem)
        return not problem

    def finish(self, manifest: Manifest, late_fields: LateFields) -> None:
        """Write manifests and exchange copies, in the thread that `save` starts; stop if a rank is gone."""
        try:
            manifest = manifest.model_copy(update=late_fields())
            part = self.own.buffer
            self.commit(self.own, manifest, self.sharding.rank)
            self.exchange_copies(part)
            for rank, slots in self.kept.items():
                self.commit(slots, manifest, rank)
        except RuntimeError as error:
            if not is_lost_peer(error):  # the main thread loses the same peer, and reports it
                raise

    def commit(self, slots: Slots, manifest: Manifest, rank: int) -> None:
        """Write the manifest that makes the buffer of `slots` the snapshot of the part of `rank`.

        Raises nothing: the text of an error is kept in `problem`, and from then on nothing is written. This
        rank still exchanges copies, for which other ranks wait; `is_free` tells them of the problem later.
        """
        if self.problem is None:
            try:
                slots.commit(manifest.model_copy(update=self.shard_fields(rank)))
            except (OSError, UserError) as error:
                self.problem = str(error)

    def shard_fields(self, rank: int) -> dict[str, Any]:
        """Return the manifest's field "shard" about a rank's part; no field if the state is not sharded."""
        if not self.sharding.context:
            return {}
        return {
            "shard": ShardFields(
                rank=rank,
                workers=self.sharding.world_size,
                weights=self.sharding.weights_are_sharded,
                generation=self.generation,
            )
        }

    def exchange_copies(self, buffer: StagingBuffer) -> None:
        """Send this rank's rows in `buffer` to the rank that keeps their copy; receive those to keep here.

        Does nothing if no copies are made. Raises RuntimeError if one of these ranks is gone. Collective.
        """
        keeper = self.keepers[self.sharding.rank]
        if self.group is None or keeper is None:
            return
        names = self.part_specs(keeper).keys()  # of the tensors that are copied
        parts = [buffer.pieces(names), *(slots.buffer.pieces(names) for slots in self.kept.values())]
        for sent, *received in itertools.zip_longest(*parts):
            outgoing = [] if sent is None else [(keeper, sent)]
            incoming = [
                (rank, piece) for rank, piece in zip(self.kept, received, strict=True) if piece is not None
            ]
            self.group.send_and_receive(outgoing, incoming)

    def remove_outdated(self, step: int) -> None:
        """Remove the folders that no worker writes to and that have no snapshot past `step`.

        There must be a complete snapshot of `step`. Only the first worker of a node calls it; not collective.
        """
        for store in self.snapshots.unused_folders(self.used):
            if max(store.steps(), default=0) <= step:
                remove_folder(Path(store.url), f"older than the snapshot of step {step}")

    def disable(self, problem: str) -> None:
        """Remove this rank's snapshots, and save no more. All ranks call it; rank 0 logs the problem."""
        self.disabled = True
        if self.sharding.rank == 0:
            log.warning(
                f"no snapshots in memory: {self.snapshots.root.parent} cannot be used ({problem}); after a "
                "kill the run resumes from disk"
            )
        self.own.remove()
        self.remove_copies()

    def remove_copies(self) -> None:
        for slots in self.kept.values():
            slots.remove()
        self.kept = {}

    def leave_to_agent(self) -> None:
        """Have the agent remove the run's snapshots when it ends, unless a generation has begun before."""
        if self.own.buffers:
            (self.own.folder / LEFT_TO_AGENT).touch()

    def remove(self) -> None:
        """Wait for the save to end, and remove the run's snapshots. All ranks that save to memory call it."""
        if self.thread:
            self.thread.join()
        self.own.remove()
        self.remove_copies()
        for path in self.snapshots.folders():
            if self.sharding.local_rank == 0 and path.name not in self.used:
                remove_folder(path)
        # The last worker on this machine finds no folders.
        if not self.snapshots.folders():
            shutil.rmtree(self.snapshots.root, ignore_errors=True)
