"""The snapshots of a run at one place: a folder or any fsspec URL.

`step_00001200.safetensors` holds tensors and `step_00001200.json`, the manifest, describes them. The manifest
is written last, after the tensors are on disk: **a snapshot exists when its manifest does and its checksums
hold.** A file appears whole or not at all, by rename in a folder and by a single PUT elsewhere. A snapshot
that does not hold is renamed, so that it can still be looked at. No pickle is ever loaded, and nothing
depends on the number of workers.
"""

import contextlib
import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt import events
from mingpt.errors import ClaimLost, CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.snapshot.manifest import (
    MAX_BYTES,
    QUARANTINED,
    Snapshot,
    decode_manifest,
    encode_manifest,
    file_name,
    step_of,
)
from mingpt.snapshot.reading import SourceFile, with_retries
from mingpt.snapshot.tensors import Check, accept_all, check_finite, read_checked

RETRIES_S = (0.5, 2.0)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
PIECE_BYTES = 1 << 20
Content = bytes | memoryview
log = logging.getLogger(__name__)


class SnapshotStore:
    """Reads and writes snapshots at `url`. Raises UserError if no driver for it is installed.

    Reading that fails, and an upload to an object store, is retried after each of `retries_s` seconds.
    """

    def __init__(self, url: str, retries_s: tuple[float, ...] = RETRIES_S) -> None:
        self.url, self.retries_s = url, retries_s
        self.unreadable: dict[int, str] = {}  # step -> reason; may be valid, so they are never pruned
        try:
            options = {"use_listings_cache": False} if "://" in url else {}
            self.files, self.root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"snapshot.path {url} needs a driver that is not installed: {error}") from None
        self.is_local = isinstance(self.files, LocalFileSystem)
        self.is_ready = True  # false where there was no room to make it so
        self.is_process_private = self.files.protocol == "memory"
        # Called before a file gets its name; raises ClaimLost if the place is no longer ours.
        self.check_claim: Callable[[], None] = lambda: None

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """The names of all files there."""
        self.files.invalidate_cache()
        try:
            return sorted(str(entry).rsplit("/", 1)[-1] for entry in self.files.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self, kind: str = "json") -> list[int]:
        """Steps that have a manifest (or a tensor file), valid or not; newest first."""
        return steps_in(self.names(), kind)

    def list_names(self) -> list[str]:
        """As `names`, with retries. Raises UnreadableSnapshot if the folder cannot be read."""
        try:
            return with_retries(self.names, f"the folder {self.url}", self.retries_s)
        except CorruptSnapshot as error:  # a loop of links
            raise UnreadableSnapshot(str(error)) from None

    def completed_steps(self) -> tuple[int, int]:
        """The newest step with a manifest, and the newest one set aside with a manifest; 0 for none.

        Raises UnreadableSnapshot.
        """
        names = self.list_names()
        set_aside = [int(match[1]) for match in map(QUARANTINED.fullmatch, names) if match]
        return max([0, *steps_in(names, "json")]), max([0, *set_aside])

    def prepare(self) -> None:
        """Create the folder and remove unfinished files. Raises UserError if it cannot be written to.

        A full disk is no reason to refuse a job: it may have room again when there is a snapshot to write.
        """
        try:
            self.make_ready()
        except Exception as error:  # each driver raises exceptions of its own
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                log.warning("there is no room for snapshots in %s (%s)", self.url, error.strerror)
                return
            reason = f"{type(error).__name__}: {error}"
            raise UserError(f"the snapshot folder {self.url} cannot be written to: {reason}") from None

    def make_ready(self) -> None:
        """Create the folder, remove unfinished files, and write and remove a file."""
        self.is_ready, probe = False, f"probe-{os.getpid()}"
        self.files.makedirs(self.root, exist_ok=True)
        for name in self.names():
            if name.startswith("partial-"):
                self.files.rm_file(self.path(name))
        self.write_atomic(probe, b"writable")
        self.files.rm_file(self.path(probe))
        self.is_ready = True

    def write_atomic(self, name: str, content: Content) -> None:
        """Write a file so that it is there whole, and durable, or not at all."""
        if not self.is_local:
            self.check_claim()
            self.upload(name, bytes(content))
            return
        partial, final = self.path(f"partial-{name}"), self.path(name)
        events.emit("file_write", name=name, path=partial, content=content)
        try:
            with open(partial, "wb", buffering=0) as file:
                remaining = memoryview(content)
                while remaining:
                    written = file.write(remaining)
                    remaining = remaining[written:]
                os.fsync(file.fileno())
            self.check_claim()
            os.replace(partial, final)
        except (OSError, ClaimLost):
            with contextlib.suppress(OSError):
                os.unlink(partial)  # on a full disk it would take the next snapshot's room
            raise
        self.fsync_folder()

    def upload(self, name: str, content: bytes) -> None:
        """PUT an object and check its size; object stores have short failures, so it is retried."""
        for pause_s in (*self.retries_s, None):
            try:
                self.files.pipe_file(self.path(name), content)
                self.files.invalidate_cache()
                size = self.files.size(self.path(name))
                if size != len(content):  # s3fs once truncated uploads silently
                    raise OSError(f"{self.url}/{name} has {size} bytes of {len(content)} after writing")
                return
            except Exception as error:  # each driver raises exceptions of its own
                if pause_s is None:
                    raise
                reason = f"{type(error).__name__}: {error}"
                log.info("writing %s/%s failed (%s) and is retried", self.url, name, reason)
                time.sleep(pause_s)

    def fsync_folder(self) -> None:
        """Make renames and removals durable."""
        if self.is_local:
            handle = os.open(self.root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def write(self, manifest: dict[str, Any], content: Content) -> None:
        """Save the bytes of a safetensors file as the snapshot of `manifest["step"]`; durable on return."""
        self.check_claim()
        step = manifest["step"]
        if not self.is_ready:
            self.make_ready()
        has_manifest = self.files.exists(self.path(file_name(step, "json")))
        if has_manifest:  # it must not describe the new tensors
            self.remove(step)
        encoded = encode_manifest(manifest, hashlib.sha256(content).hexdigest(), len(content))
        self.write_atomic(file_name(step, "safetensors"), content)
        try:
            self.write_atomic(file_name(step, "json"), encoded)
        except OSError:
            with contextlib.suppress(OSError):
                self.remove(step)  # the tensors without their manifest would take room for nothing
            raise
        self.unreadable.pop(step, None)

    def remove(self, step: int) -> None:
        """Delete a snapshot, manifest first."""
        self.check_claim()
        for kind in ("json", "safetensors"):
            path = self.path(file_name(step, kind))
            is_there = self.files.exists(path)
            if is_there:
                self.files.rm_file(path)
            self.fsync_folder()

    def file(self, step: int, kind: str, what: str) -> SourceFile:
        """A file of a snapshot, for reading; messages call it `what`."""
        return SourceFile(self.files, self.path(file_name(step, kind)), what, self.retries_s)

    def verify(self, step: int) -> None:
        """Check the checksums of a snapshot without holding it in memory. Raises as `read` does."""
        manifest = self.read_manifest(step)
        file = self.file(step, "safetensors", "its tensor file")
        size, digest = file.size(), hashlib.sha256()
        for offset in range(0, size, PIECE_BYTES):
            digest.update(file.read(offset, min(offset + PIECE_BYTES, size)))
        if digest.hexdigest() != manifest["sha256"]:
            raise CorruptSnapshot("its tensor file has another SHA-256 than its manifest says")

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Raises CorruptSnapshot or UnreadableSnapshot."""
        file = self.file(step, "json", "its manifest")
        size = file.size()
        if size > MAX_BYTES:
            raise CorruptSnapshot(f"its manifest has {size:,} bytes, more than {MAX_BYTES:,}")
        manifest = decode_manifest(file.read(0, size))
        if manifest["step"] != step:
            raise CorruptSnapshot(f"its manifest is that of step {manifest['step']}")
        return manifest

    def read(self, step: int, check: Check = accept_all) -> Snapshot:
        """Raises CorruptSnapshot unless every checksum holds and every field and tensor is as it should be.

        `check` is asked before the tensors are read. Raises UnreadableSnapshot if reading fails.
        """
        manifest = self.read_manifest(step)
        file = self.file(step, "safetensors", "its tensor file")
        size, expected = file.size(), manifest["bytes"]
        if size != expected:
            raise CorruptSnapshot(f"its tensor file has {size:,} bytes instead of {expected:,}")
        content = read_checked(file, size, lambda entries: check(manifest, entries))
        if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
            raise CorruptSnapshot("its tensor file has another SHA-256 than its manifest says")
        check_finite(content)
        return Snapshot(manifest, content)

    def quarantine(self, step: int, reason: str) -> None:
        """Rename the files of a snapshot, so that it is not used again and can still be looked at."""
        names, number = self.names(), 1
        while any(name.startswith(f"damaged-{number}-step_{step:08d}.") for name in names):
            number += 1
        target = f"damaged-{number}-step_{step:08d}."
        for kind in ("safetensors", "json"):
            name = file_name(step, kind)
            if name in names:
                with contextlib.suppress(FileNotFoundError):  # another node, on the same folder, was faster
                    self.files.mv(self.path(name), self.path(target + kind))
        self.fsync_folder()
        log.warning("snapshot of step %d set aside as %s*: %s", step, self.path(target), reason)

    def find_newest(self, check: Check = accept_all) -> tuple[Snapshot | None, dict[int, str]]:
        """The newest valid snapshot, and what is wrong with each newer one; see `unreadable`, too.

        Raises UnreadableSnapshot if the folder cannot be read.
        """
        corrupt: dict[int, str] = {}
        self.unreadable = {}
        names = {*self.list_names(), *self.list_names()}  # the first one may be late in an object store
        for step in steps_in(names):
            try:
                return self.read(step, check), corrupt
            except CorruptSnapshot as error:
                corrupt[step] = str(error)
            except UnreadableSnapshot as error:
                self.unreadable[step] = str(error)
        return None, corrupt


def steps_in(names: Iterable[str], kind: str | None = None) -> list[int]:
    """Steps of the snapshots' files (of this kind, or of either) among these names; newest first."""
    found = {step_of(name, kind) for name in names}
    return sorted((step for step in found if step is not None), reverse=True)
