"""Frequent snapshots in a node's memory, so that a killed worker costs a few steps at most.

They lie in a folder such as /dev/shm, which outlives the workers but not the node, named after the random id
that run.json gives the run. Where each rank holds the whole state, the first worker of the node writes it;
sharded states are written in parts, see `shard` in the manifest. One copy is made between two steps, then a
checksum in the background. An orderly end removes them. If the folder is absent or too small, one line says
so, and the run goes on with its snapshots on disk alone.

A job that dies as a whole leaves its folder, and so does a node whose rank changes. A file beside it names
the agent that it belongs to, so that a later start can tell what nobody needs any more.
"""

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mingpt import events
from mingpt.errors import CorruptSnapshot, SaveAborted, UnreadableSnapshot
from mingpt.snapshot.handle import Snapshot
from mingpt.snapshot.layout import specs_of
from mingpt.snapshot.names import step_of
from mingpt.snapshot.process import Process, this_process
from mingpt.snapshot.saver import LateFields
from mingpt.snapshot.slots import Slots, owner_file, read_owner
from mingpt.snapshot.store import SnapshotStore
from mingpt.snapshot.tensors import Check, accept_all

log = logging.getLogger(__name__)
LEFTOVER_S = 24 * 3600.0


class MemorySnapshots:
    """The snapshots of one run in this machine's memory. A node writes to its own folders and reads all."""

    def __init__(
        self, path: str, run_id: str, run_dir: Path, node_rank: int, owner: Process | None = None
    ) -> None:
        # A copy of a run folder is another run with the same id.
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.root = Path(path) / f"mingpt-{run_id}-{place}"
        self.node_rank = node_rank
        self.owner = owner or this_process()  # the agent on this node
        self.slots = self.make_slots("")
        self.thread: threading.Thread | None = None
        self.disabled = False

    def make_slots(self, suffix: str) -> Slots:
        """Room for two snapshots in this node's folder with this suffix; opened by its `open`."""
        return Slots(self.root / f"node-{self.node_rank}{suffix}", self.owner)

    def find(
        self, newer_than: int, saved_after: int | None, check: Check = accept_all
    ) -> list[tuple[SnapshotStore, Snapshot]]:
        """Those past the step `newer_than` that fulfil `check`, newest first; what they hold is not read yet.

        Each names the newest snapshot on disk at its time. If that is newer than `saved_after`, it does not
        count. `verify` of its store tells whether one is valid.
        """
        found = []
        for path in sorted(self.root.glob("node-*")):
            store = SnapshotStore(str(path))
            found += [(step, store) for step in store.steps() if step > newer_than]
        snapshots = []
        for step, store in sorted(found, key=lambda one: -one[0]):
            try:
                snapshot = store.open(step, check)
            except (CorruptSnapshot, UnreadableSnapshot):
                continue  # it was being written when its worker died; the other one is valid
            if saved_after is None or snapshot.manifest.get("after", 0) <= saved_after:
                snapshots.append((store, snapshot))
        return snapshots

    def remove_newer(self, step: int) -> None:
        """Remove those past the step that a job starts from: the user has turned back to that step."""
        for path in self.root.glob("node-*"):
            store = SnapshotStore(str(path))
            for newer in store.steps():
                if newer > step:
                    store.remove(newer)

    def save(
        self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], late_fields: LateFields = dict
    ) -> None:
        """Copy a state and write its manifest in the background; skipped if the last one is not finished."""
        self.allocate(tensors)
        if self.disabled or (self.thread and self.thread.is_alive()):
            return
        try:
            self.slots.begin()
        except OSError as error:
            self.disable(error)
            return
        self.slots.fill(tensors)
        self.thread = threading.Thread(target=self.finish, args=(manifest, late_fields))
        self.thread.start()

    def allocate(self, tensors: Mapping[str, Tensor], start_step: int | None = None) -> None:
        """Allocate room for two such states, if that is not done yet; then saving is only a copy.

        `start_step`: from which this generation starts; none past it is kept.
        """
        if self.disabled or self.slots.buffers:
            return
        try:
            if start_step is not None:
                self.trim(start_step)
            self.slots.open(specs_of(tensors), start_step)
        except OSError as error:
            size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            self.disable(error, f" for 2 x {size_mb:.1f} MB")

    def finish(self, manifest: dict[str, Any], late_fields: LateFields) -> None:
        """In the background: checksum and manifest."""
        step = manifest["step"]
        events.emit("write_start", kind="memory", step=step)
        try:
            self.slots.commit(manifest | late_fields())
        except SaveAborted:
            return  # the main thread loses the same peer, and reports it
        except OSError as error:
            self.disable(error)
            return
        events.emit("write_end", kind="memory", step=step)

    def disable(self, error: OSError, need: str = "") -> None:
        """Say once that there are no snapshots in memory, and free what is there."""
        self.disabled = True
        log.warning("%s", no_memory(self.root.parent, str(error.strerror), need))
        self.slots.remove()

    def remove_leftovers(self) -> None:
        """Remove what other runs of this user left a day ago, unless a process of their jobs may be alive."""
        for root in self.root.parent.glob("mingpt-*"):
            if root != self.root and is_leftover(root):
                remove_folder(root, "what another run left more than a day ago")

    def remove_outdated(self, step: int, used: Container[str] | None = None) -> None:
        """Remove this run's folders that nobody writes to, once a newer snapshot, that of `step`, is there.

        `used`: the names of those that workers of this generation write to, by default that of `slots`.
        """
        for path in self.unused_folders(used):
            newest = max(SnapshotStore(str(path)).steps(), default=0)
            if newest <= step:
                remove_folder(path, f"older than the snapshot of step {step}")
                owner_file(path).unlink(missing_ok=True)

    def trim(self, step: int, used: Container[str] | None = None) -> None:
        """Make room at a start from `step`: of what `remove_outdated` may remove, keep the newest up to that.

        Raises OSError.
        """
        for path in self.unused_folders(used):
            store = SnapshotStore(str(path))
            kept = max((older for older in store.steps() if older <= step), default=None)
            for name in store.names():
                if kept is None or step_of(name) != kept:
                    store.remove_file(name)

    def unused_folders(self, used: Container[str] | None) -> list[Path]:
        used = {self.slots.folder.name} if used is None else used
        found = []
        for path in self.root.glob("node-*"):
            owner = read_owner(path)
            is_ours = owner is None or owner == self.owner or owner.is_alive() is False
            if is_ours and path.name not in used:
                found.append(path)
        return found

    def remove(self) -> None:
        """Remove all of this run's snapshots from memory."""
        if self.thread:
            self.thread.join()
        # Errors are ignored: another worker of this machine may be removing them too.
        shutil.rmtree(self.root, ignore_errors=True)


def no_memory(path: Path, reason: str, need: str = "") -> str:
    """The line that says why there are no snapshots in memory."""
    return (
        f"no snapshots in memory: {path} cannot be used{need} ({reason}); after a kill the run resumes "
        "from disk"
    )


def is_leftover(root: Path) -> bool:
    """Whether nothing changed in a run's folder for a day and no process of its job may be alive."""
    try:
        if root.is_symlink() or root.stat().st_uid != os.getuid():
            return False
        owners = [read_owner(path) for path in root.glob("node-*")]
        newest_change = max(path.stat().st_mtime for path in (root, *root.rglob("*")))
    except FileNotFoundError:
        return False  # another start removes it, or its job is writing there
    is_in_use = any(owner is not None and owner.is_alive() is not False for owner in owners)
    return not is_in_use and newest_change < time.time() - LEFTOVER_S


def remove_folder(path: Path, why: str) -> None:
    try:
        shutil.rmtree(path)
        log.warning("removed %s from memory: %s", path, why)
    except FileNotFoundError:
        pass  # another start on this node was faster
    except OSError as error:
        log.warning("%s cannot be removed from memory (%s), though it is %s", path, error.strerror, why)
