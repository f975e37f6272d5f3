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
from pathlib import Path
from typing import Any

import fsspec
import yaml
from fsspec.implementations.local import LocalFileSystem

from mingpt import events
from mingpt.errors import CorruptSnapshot, UserError
from mingpt.snapshot.manifest import FILE_NAME, Snapshot, decode_manifest, encode_manifest, file_name

RETRIES_S = (0.5, 2.0)
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
Content = bytes | memoryview
log = logging.getLogger(__name__)


class SnapshotStore:
    """Reads and writes snapshots at `url`. Raises UserError if no driver for it is installed.

    An upload to an object store that fails is retried after each of `retries_s` seconds.
    """

    def __init__(self, url: str, retries_s: tuple[float, ...] = RETRIES_S) -> None:
        self.url, self.retries_s = url, retries_s
        try:
            options = {"use_listings_cache": False} if "://" in url else {}
            self.files, self.root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"snapshot.path {url} needs a driver that is not installed: {error}") from None
        self.is_local = isinstance(self.files, LocalFileSystem)
        self.is_ready = True  # false where there was no room to make it so
        self.is_process_private = self.files.protocol == "memory"

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
        matches = (FILE_NAME.fullmatch(name) for name in self.names())
        return sorted((int(match[1]) for match in matches if match and match[2] == kind), reverse=True)

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
            os.replace(partial, final)
        except OSError:
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

    def remove(self, step: int) -> None:
        """Delete a snapshot, manifest first."""
        for kind in ("json", "safetensors"):
            path = self.path(file_name(step, kind))
            is_there = self.files.exists(path)
            if is_there:
                self.files.rm_file(path)
            self.fsync_folder()

    def verify(self, step: int) -> None:
        """Check the checksums of a snapshot without holding it in memory. Raises CorruptSnapshot, OSError."""
        manifest = self.read_manifest(step)
        digest = hashlib.sha256()
        try:
            with self.files.open(self.path(file_name(step, "safetensors")), "rb") as file:
                for piece in iter(lambda: file.read(1 << 20), b""):
                    digest.update(piece)
        except FileNotFoundError:
            raise CorruptSnapshot("its tensor file is missing") from None
        if digest.hexdigest() != manifest["sha256"]:
            raise CorruptSnapshot("its tensor file has another SHA-256 than its manifest says")

    def read_manifest(self, step: int) -> dict[str, Any]:
        """Raises CorruptSnapshot."""
        return decode_manifest(self._read_file(file_name(step, "json"), "manifest"))

    def read(self, step: int) -> Snapshot:
        """Raises CorruptSnapshot unless every checksum holds."""
        manifest = self.read_manifest(step)
        content = self._read_file(file_name(step, "safetensors"), "tensor file")
        if len(content) != manifest["bytes"]:
            expected = manifest["bytes"]
            raise CorruptSnapshot(f"its tensor file has {len(content):,} bytes instead of {expected:,}")
        if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
            raise CorruptSnapshot("its tensor file has another SHA-256 than its manifest says")
        return Snapshot(manifest, content)

    def _read_file(self, name: str, what: str) -> bytes:
        try:
            return bytes(self.files.cat_file(self.path(name)))
        except FileNotFoundError:
            raise CorruptSnapshot(f"its {what} is missing") from None
        except (IsADirectoryError, PermissionError) as error:
            raise CorruptSnapshot(f"its {what} cannot be read: {error.strerror}") from None

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

    def find_newest(self) -> tuple[Snapshot | None, dict[int, str]]:
        """The newest valid snapshot, and what is wrong with each newer one."""
        corrupt: dict[int, str] = {}
        for step in sorted({*self.steps("json"), *self.steps("safetensors")}, reverse=True):
            try:
                return self.read(step), corrupt
            except CorruptSnapshot as error:
                corrupt[step] = str(error)
        return None, corrupt


def open_snapshot(where: str) -> Snapshot:
    """A snapshot by its path or URL, or the newest of a run or snapshot folder. Raises UserError."""
    folder, _, name = where.rstrip("/").rpartition("/")
    match = FILE_NAME.fullmatch(name)
    if match:
        try:
            return SnapshotStore(folder or ".").read(int(match[1]))
        except (CorruptSnapshot, FileNotFoundError) as error:
            raise UserError(f"the snapshot {where} cannot be used: {error}") from None
    for place in possible_places(where):
        store = SnapshotStore(place)
        for step in store.steps():
            try:
                return store.read(step)
            except CorruptSnapshot as error:
                log.warning("snapshot of step %d in %s skipped: %s", step, place, error)
    raise UserError(
        f"there is no snapshot in {where}: give a run folder such as out/default, or a step_*.safetensors"
    )


def possible_places(where: str) -> list[str]:
    """Where a run folder's snapshots may be: `snapshot.path` of its config.yaml, `snapshots/`, itself."""
    places = [f"{where.rstrip('/')}/snapshots", where]
    config = Path(where) / "config.yaml"
    if "://" in where or not config.is_file():
        return places
    try:
        configured = yaml.safe_load(config.read_text(encoding="utf-8"))["snapshot"]["path"]
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
        log.warning("%s is damaged and ignored", config)
        return places
    return [configured, *places] if configured else places
