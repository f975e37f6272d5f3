"""Frequent snapshots in a node's memory, so that a killed worker loses a few steps at most.

They lie in a folder such as /dev/shm, which outlives the workers and not the node, under the random id that run.json gives the run:
for any other run they do not exist. Their two files are written in turns, in place, by the first worker of the node: one copy
between two steps, then a checksum in the background. An orderly end removes them; a folder that is absent or too small is told once,
and the run goes on with its durable snapshots alone.
"""

import errno
import hashlib
import logging
import mmap
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mingpt.snapshot import Abandoned, Damaged, Folder, Rest, Snapshot, manifest_of
from mingpt.stage import Stage

log = logging.getLogger(__name__)


class Memory:
    """The snapshots of one run in this machine's memory. Each node (by `node`, its number) writes to a folder of its own and reads all."""

    def __init__(self, path: str, run: str, run_dir: Path, node: int) -> None:
        place = hashlib.sha256(str(run_dir.resolve()).encode()).hexdigest()[:8]  # a copy of a run folder is another run with the same id
        self.root = Path(path) / f"mingpt-{run}-{place}"
        self.own = Folder(str(self.root / f"node-{node}"))
        self.slots: list[Stage] = []
        self.names = ["slot-0", "slot-1"]
        self.turn = 0
        self.thread: threading.Thread | None = None
        self.off = False

    def newest(self, newer_than: int, beside: int | None) -> Snapshot | None:
        """The newest one that holds and is newer than a step; only one that follows no later durable snapshot than `beside`, if that is given."""
        found = [(step, Folder(str(path))) for path in self.root.glob("node-*") for step in Folder(str(path)).steps()]
        for step, folder in sorted(found, key=lambda one: -one[0]):
            if step <= newer_than:
                break
            try:
                if beside is None or folder.manifest(step).get("after", 0) <= beside:
                    return folder.read(step)
            except Damaged:
                pass  # it was being written when its worker died; the other one stands
        return None

    def drop_newer(self, step: int) -> None:
        """What lies beyond the step that a job starts from belongs to a past that somebody has turned away from."""
        for path in self.root.glob("node-*"):
            folder = Folder(str(path))
            for newer in folder.steps():
                if newer > step:
                    folder.remove(newer)

    def take(self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], rest: Rest = dict) -> None:
        """Copy a state, name it in the background. Nothing happens while the one before is being named, or where there is no room."""
        self.reserve(tensors)
        if self.off or (self.thread and self.thread.is_alive()):
            return
        try:
            self.begin()
        except OSError as error:
            self.give_up(error)
            return
        self.slots[self.turn].fill(tensors)
        self.thread = threading.Thread(target=self.finish, args=(manifest, rest))
        self.thread.start()

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Find room for two such states, if that is not done yet: pages that are there already make the copy a copy."""
        if self.off or self.slots:
            return
        try:
            self.open(tensors)
        except OSError as error:
            self.give_up(error, f" for 2 x {sum(tensor.nbytes for tensor in tensors.values()) / 1e6:.1f} MB")

    def open(self, tensors: Mapping[str, Tensor]) -> None:
        """Two files; what an earlier generation left gives way to the first. Raises OSError."""
        self.root.mkdir(mode=0o700, exist_ok=True)
        folder = Path(self.own.root)
        folder.mkdir(exist_ok=True)
        kept = max(self.own.steps(), default=None)  # until there is a newer one, it stays
        for name in self.own.names():
            if kept is None or not name.startswith(f"step_{kept:08d}."):
                (folder / name).unlink()
        first = Stage(tensors, lambda size: mapped(folder / "slot-0", size))
        if kept is not None:
            path = folder / f"step_{kept:08d}.safetensors"
            if path.exists() and path.stat().st_size == len(first.buffer):
                self.names[1] = path.name
            else:
                self.own.remove(kept)
        self.slots = [first, Stage(tensors, lambda size: mapped(folder / self.names[1], size))]

    def begin(self) -> None:
        """From here on the older file is no snapshot."""
        folder, name, free = Path(self.own.root), self.names[self.turn], f"slot-{self.turn}"
        if name != free:
            (folder / name).with_suffix(".json").unlink()
            (folder / name).rename(folder / free)
            self.names[self.turn] = free

    def finish(self, manifest: dict[str, Any], rest: Rest) -> None:
        """In the background: the file gets its name, and then a manifest."""
        folder, name = Path(self.own.root), f"step_{manifest['step']:08d}"
        content = self.slots[self.turn].content
        try:
            (folder / f"slot-{self.turn}").rename(folder / f"{name}.safetensors")
            self.own.put(f"{name}.json", manifest_of(manifest | rest(), hashlib.sha256(content).hexdigest(), len(content)))
        except Abandoned:
            return  # the main thread meets the same end, and says so
        except OSError as error:
            self.give_up(error)
            return
        self.names[self.turn] = f"{name}.safetensors"
        self.turn = 1 - self.turn

    def give_up(self, error: OSError, need: str = "") -> None:
        """One line, and no more of it."""
        self.off, self.slots = True, []
        log.warning(
            "no snapshots in memory: %s cannot be used%s (%s); a killed worker goes back to the newest durable one",
            self.root.parent,
            need,
            error.strerror,
        )
        shutil.rmtree(self.own.root, ignore_errors=True)  # gone already, or not to be had at all

    def remove(self) -> None:
        """Nothing of this run stays in memory."""
        if self.thread:
            self.thread.join()
        shutil.rmtree(self.root, ignore_errors=True)  # another worker of this machine may be at it too


def mapped(path: Path, size: int) -> Tensor:
    """(size,) uint8 that are a file's bytes. Raises OSError where there is no room; a sparse file would end in SIGBUS."""
    if not hasattr(os, "posix_fallocate"):
        raise OSError(errno.ENOSYS, "this system reserves no room ahead")
    with open(path, "a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        pages = mmap.mmap(file.fileno(), size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    return torch.frombuffer(pages, dtype=torch.uint8)
