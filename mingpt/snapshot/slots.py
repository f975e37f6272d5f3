"""Slots: two files in a node's memory that hold a snapshot each and are written in turn.

The files are mapped once and overwritten in place, so that saving is one copy between two steps; checksum and
manifest follow in the background. While one file is overwritten, the other holds a valid snapshot.

The folder of the files is left behind if a job dies as a whole, or if a node's rank changes. A file beside
the folder names the agent (torchrun's) to which the folder belongs, so a later start knows what to remove.
"""

import contextlib
import errno
import functools
import hashlib
import json
import logging
import mmap
import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import pydantic
import torch
from torch import Tensor

from mingpt.base.files import BadJson, read_json
from mingpt.snapshot.layout import StagingBuffer, TensorSpec, file_layout, file_name, files_of, specs_of
from mingpt.snapshot.manifest import FileRecord, Manifest, encode_manifest
from mingpt.snapshot.store import SnapshotStore

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Process:
    """A process on a machine; `start_time` distinguishes it from a later process with the same id."""

    __pydantic_config__: ClassVar = pydantic.ConfigDict(extra="forbid")
    host: str
    machine: str  # one boot and one pid namespace, within which process ids are valid
    pid: Annotated[int, pydantic.Field(strict=True, gt=0, lt=2**31)]
    start_time: str | None  # in clock ticks since the machine's boot; None if the system does not tell

    def is_alive(self) -> bool | None:
        """Return whether the process is alive; None if it is on another machine, or hidden by /proc."""
        if self.machine != this_machine():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # a process of another user
        state, start_time = read_stat(self.pid)
        if state is None and self.start_time is not None:
            return None  # /proc hides it
        return state != "Z" and start_time == self.start_time


def this_process(pid: int | None = None) -> Process:
    """Return the process with this id on this machine, by default the calling one."""
    pid = os.getpid() if pid is None else pid
    return Process(socket.gethostname(), this_machine(), pid, read_stat(pid)[1])


def this_machine() -> str:
    """Return a name that two processes share if and only if they see each other's ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()  # no Linux


def read_stat(pid: int) -> tuple[str | None, str | None]:
    """Return the state and the start time of a process from /proc; None for both if it has no entry."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None, None
    return fields[0], fields[19]


class Slots:
    """Writes snapshots in turn to two files in `folder`, which belongs to the agent `owner`.

    After `open`, each save calls `begin`, writes to `buffer`, and calls `commit`. Of the methods, only
    `commit` may run in a background thread.
    """

    def __init__(self, folder: Path, owner: Process) -> None:
        self.folder, self.owner = folder, owner
        self.store = SnapshotStore(str(folder))
        self.buffers: list[StagingBuffer] = []
        self.tokenizer: bytes | None = None
        self.names = ["slot-0", "slot-1"]
        self.next_slot = 0
        self.kept: int | None = None  # step of a snapshot in a third file, until there is a newer one

    def open(
        self, tensors: Mapping[str, Tensor] | Mapping[str, TensorSpec], start_step: int | None = None
    ) -> None:
        """Create the folder and map two files. Raises OSError if there is no room for tensors like `tensors`.

        Of earlier generations' snapshots, only the newest up to `start_step` (None: the newest of all) stays,
        until there is a newer one. If its file has the right size, it becomes one of the two.
        """
        self.folder.parent.mkdir(mode=0o700, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        owner_file(self.folder).write_text(json.dumps(asdict(self.owner)))
        steps = [step for step in self.store.steps() if start_step is None or step <= start_step]
        newest = max(steps, default=None)
        names = self.store.names()
        kept = [] if newest is None else files_of(names, newest)
        for name in names:
            if name not in kept:
                (self.folder / name).unlink()
        size = file_layout("", specs_of(tensors)).size
        if newest is not None:
            path = self.folder / file_name(newest, "safetensors")
            if path.exists() and path.stat().st_size == size:
                self.names[1] = path.name
            else:
                self.kept = newest
        self.buffers = [
            StagingBuffer(tensors, functools.partial(map_file, self.folder / name)) for name in self.names
        ]

    @property
    def buffer(self) -> StagingBuffer:
        """The buffer of the next snapshot, to be written between `begin` and `commit`."""
        return self.buffers[self.next_slot]

    def begin(self) -> None:
        """Prepare to overwrite `buffer`: remove the manifest of the snapshot in its file, if any.

        The third file's snapshot, `kept`, is removed if there is a newer one. Raises OSError.
        """
        name, free = self.names[self.next_slot], f"slot-{self.next_slot}"
        if self.kept is not None and max(self.store.steps(), default=0) > self.kept:
            self.store.remove(self.kept)
            self.kept = None
        if name != free:
            (self.folder / name).with_suffix(".json").unlink()
            (self.folder / name).with_suffix(".tokenizer").unlink(missing_ok=True)
            (self.folder / name).rename(self.folder / free)
            self.names[self.next_slot] = free

    def commit(self, manifest: Manifest) -> None:
        """Make `buffer` the snapshot of `manifest.step`, and switch buffers.

        Raises OSError, or UserError if the manifest would be too large.
        """
        step, content = manifest.step, self.buffer.content
        name = file_name(step, "safetensors")
        (self.folder / f"slot-{self.next_slot}").rename(self.folder / name)
        sha256 = hashlib.sha256(content).hexdigest()
        records = [FileRecord(name=name, sha256=sha256, bytes=len(content))]
        if self.tokenizer is not None:
            records.append(self.store.write_tokenizer(step, self.tokenizer))
        self.store.write_atomic(file_name(step, "json"), encode_manifest(manifest.with_files(records)))
        self.names[self.next_slot] = name
        self.next_slot = 1 - self.next_slot

    def remove(self) -> None:
        """Drop the buffers, and remove the folder and its owner file. Raises nothing."""
        self.buffers = []
        remove_folder(self.folder)


def owner_file(folder: Path) -> Path:
    """Return the path of the file beside a node's folder that names the agent to which it belongs."""
    return folder.with_name(f"owner-of-{folder.name}.json")


def read_owner(folder: Path) -> Process | None:
    """Return the agent to which a node's folder belongs; None if it is not known."""
    try:
        return Process(**read_json(owner_file(folder), Process))
    except (OSError, BadJson):
        return None  # an earlier version of this program wrote none


def remove_folder(folder: Path, why: str | None = None) -> None:
    """Remove a folder of snapshots in memory, and the file beside it that names its owner. Raises nothing.

    `why` is logged, if given.
    """
    if why:
        log.warning(f"removing {folder} from memory: {why}")
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # the memory cannot be used; the folder's owner reports it
        owner_file(folder).unlink(missing_ok=True)


def map_file(path: Path, size: int) -> Tensor:
    """Map `size` bytes of a file, created if missing, as a one-dimensional uint8 tensor; return the tensor.

    Raises OSError if there is no room. The room is allocated at once: a sparse file could cause SIGBUS later.
    """
    if not hasattr(os, "posix_fallocate"):
        raise OSError(errno.ENOSYS, "this system has no posix_fallocate")
    with open(path, "a+b") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        pages = mmap.mmap(file.fileno(), size, flags=flags)
    return torch.frombuffer(pages, dtype=torch.uint8)
