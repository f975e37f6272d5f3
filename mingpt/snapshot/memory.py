"""Frequent snapshots in a node's memory, so that a killed worker costs a few steps at most.

They lie in a folder such as /dev/shm, which outlives the workers but not the node, named after the random id
that run.json gives the run. The first worker of the node writes two files alternately, in place: one copy
between two steps, then a checksum in the background. An orderly end removes them. If the folder is absent or
too small, one line says so, and the run goes on with its snapshots on disk alone.

A job that dies as a whole leaves its folder, and so does a node whose rank changes. A file beside it names
the agent that it belongs to, so that a later start can tell what nobody needs any more.
"""

import errno
import hashlib
import json
import logging
import mmap
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt import events
from mingpt.errors import CorruptSnapshot, SaveAborted, UnreadableSnapshot
from mingpt.snapshot.handle import Snapshot
from mingpt.snapshot.layout import file_layout, specs_of
from mingpt.snapshot.manifest import FileRecord, encode_manifest
from mingpt.snapshot.names import file_name
from mingpt.snapshot.process import Process, parse_process, this_process
from mingpt.snapshot.saver import LateFields
from mingpt.snapshot.staging import StagingBuffer
from mingpt.snapshot.store import SnapshotStore
from mingpt.snapshot.tensors import Check, accept_all

log = logging.getLogger(__name__)
LEFTOVER_S = 24 * 3600.0


class MemorySnapshots:
    """The snapshots of one run in this machine's memory. A node writes to its own folder and reads all."""

    def __init__(
        self, path: str, run_id: str, run_dir: Path, node_rank: int, owner: Process | None = None
    ) -> None:
        # A copy of a run folder is another run with the same id.
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]
        self.root = Path(path) / f"mingpt-{run_id}-{place}"
        self.own = SnapshotStore(str(self.root / f"node-{node_rank}"))
        self.owner = owner or this_process()  # the agent on this node
        self.buffers: list[StagingBuffer] = []
        self.names = ["slot-0", "slot-1"]
        self.next_slot = 0
        self.thread: threading.Thread | None = None
        self.disabled = False

    def find_newest(
        self, newer_than: int, saved_after: int | None, check: Check = accept_all
    ) -> Snapshot | None:
        """The newest valid one past the step `newer_than`; None if there is none.

        Each names the newest snapshot on disk at its time. If that is newer than `saved_after`, it does not
        count.
        """
        found = []
        for path in self.root.glob("node-*"):
            store = SnapshotStore(str(path))
            found += [(step, store) for step in store.steps() if step > newer_than]
        for step, store in sorted(found, key=lambda one: -one[0]):
            try:
                newest_on_disk = store.read_manifest(step).get("after", 0)
                if saved_after is None or newest_on_disk <= saved_after:
                    return store.read(step, check)
            except (CorruptSnapshot, UnreadableSnapshot):
                pass  # it was being written when its worker died; the other one is valid
        return None

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
            self.invalidate_next_slot()
        except OSError as error:
            self.disable(error)
            return
        self.buffers[self.next_slot].fill(tensors)
        self.thread = threading.Thread(target=self.finish, args=(manifest, late_fields))
        self.thread.start()

    def allocate(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate room for two such states, if that is not done yet; then saving is only a copy."""
        if self.disabled or self.buffers:
            return
        try:
            self.open_slots(tensors)
        except OSError as error:
            size_mb = sum(tensor.nbytes for tensor in tensors.values()) / 1e6
            self.disable(error, f" for 2 x {size_mb:.1f} MB")

    def open_slots(self, tensors: Mapping[str, Tensor]) -> None:
        """Map two files; what an earlier generation left is reused, its newest last. Raises OSError."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        folder = Path(self.own.root)
        self.adopt_folder()
        folder.mkdir(exist_ok=True)
        owner_file(folder).write_text(json.dumps(self.owner.to_dict()))
        newest = max(self.own.steps(), default=None)  # kept until there is a newer one
        for name in self.own.names():
            if newest is None or not name.startswith(f"step_{newest:08d}."):
                (folder / name).unlink()
        layout = file_layout("", specs_of(tensors))  # one file, whatever its size
        first = StagingBuffer(tensors, lambda size: map_file(folder / "slot-0", size), layout)
        if newest is not None:
            path = folder / file_name(newest, "safetensors")
            if path.exists() and path.stat().st_size == len(first.buffer):
                self.names[1] = path.name
            else:
                self.own.remove(newest)
        second = StagingBuffer(tensors, lambda size: map_file(folder / self.names[1], size), layout)
        self.buffers = [first, second]

    def adopt_folder(self) -> None:
        """Go on with the folder that this agent had when its node had another rank. Raises OSError."""
        for path in self.root.glob("node-*"):
            if not Path(self.own.root).exists() and read_owner(path) == self.owner:
                path.rename(self.own.root)
                owner_file(path).unlink()

    def invalidate_next_slot(self) -> None:
        """Remove the older snapshot's manifest before its file is overwritten."""
        folder, name, free = Path(self.own.root), self.names[self.next_slot], f"slot-{self.next_slot}"
        if name != free:
            (folder / name).with_suffix(".json").unlink()
            (folder / name).rename(folder / free)
            self.names[self.next_slot] = free

    def finish(self, manifest: dict[str, Any], late_fields: LateFields) -> None:
        """In the background: rename the file, then write its manifest."""
        folder, step = Path(self.own.root), manifest["step"]
        name = file_name(step, "safetensors")
        content = self.buffers[self.next_slot].content
        events.emit("write_start", kind="memory", step=step)
        try:
            (folder / f"slot-{self.next_slot}").rename(folder / name)
            record = FileRecord(name, hashlib.sha256(content).hexdigest(), len(content))
            encoded = encode_manifest(manifest | late_fields(), [record])
            self.own.write_atomic(file_name(step, "json"), encoded)
        except SaveAborted:
            return  # the main thread loses the same peer, and reports it
        except OSError as error:
            self.disable(error)
            return
        self.names[self.next_slot] = name
        self.next_slot = 1 - self.next_slot
        events.emit("write_end", kind="memory", step=step)

    def disable(self, error: OSError, need: str = "") -> None:
        """Say once that there are no snapshots in memory, and free what is there."""
        self.disabled, self.buffers = True, []
        log.warning(
            "no snapshots in memory: %s cannot be used%s (%s); after a kill the run resumes from disk",
            self.root.parent,
            need,
            error.strerror,
        )
        shutil.rmtree(self.own.root, ignore_errors=True)  # it may be gone, or unreachable

    def remove_leftovers(self) -> None:
        """Remove what other runs of this user left a day ago, unless a process of their jobs may be alive."""
        for root in self.root.parent.glob("mingpt-*"):
            if root != self.root and is_leftover(root):
                remove_folder(root, "what another run left more than a day ago")

    def remove_outdated(self, durable_step: int) -> None:
        """Remove this run's folders that belong to no agent any more once a newer snapshot is durable."""
        for path in self.root.glob("node-*"):
            owner = read_owner(path)
            is_ours = owner is None or owner == self.owner or owner.is_alive() is False
            if path == Path(self.own.root) or not is_ours:
                continue
            newest = max(SnapshotStore(str(path)).steps(), default=0)
            if newest <= durable_step:
                remove_folder(path, f"older than the durable snapshot of step {durable_step}")
                owner_file(path).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove all of this run's snapshots from memory."""
        if self.thread:
            self.thread.join()
        # Errors are ignored: another worker of this machine may be removing them too.
        shutil.rmtree(self.root, ignore_errors=True)


def owner_file(folder: Path) -> Path:
    """Where the agent that a node's folder belongs to is written down."""
    return folder.with_name(f"owner-of-{folder.name}.json")


def read_owner(folder: Path) -> Process | None:
    """None if it is not known."""
    try:
        return parse_process(json.loads(owner_file(folder).read_text()))
    except (OSError, ValueError):
        return None  # an earlier version of this program wrote none


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


def map_file(path: Path, size: int) -> Tensor:
    """(size,) uint8 backed by a file. Raises OSError if there is no room; a sparse file would SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        raise OSError(errno.ENOSYS, "this system has no posix_fallocate")
    with open(path, "a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        pages = mmap.mmap(file.fileno(), size, flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8)
