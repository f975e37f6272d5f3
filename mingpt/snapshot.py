"""Snapshots: two files each, in a folder or at any fsspec URL.

`step_00001200.safetensors` holds tensors, `step_00001200.json`, the manifest, says what they are, with their size and
SHA-256 and a checksum of its own. The manifest is written last, after the tensors are on disk: **a snapshot exists when
its manifest does and its checksums hold.** A file appears whole or not at all, by rename in a folder and by a single PUT
elsewhere. What does not hold is set aside under another name, never deleted. No pickle is ever loaded; nothing depends on the
number of workers, and nothing here knows a model.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import yaml
from fsspec.implementations.local import LocalFileSystem
from safetensors.torch import load
from torch import Tensor

from mingpt.config import UserError
from mingpt.stage import Stage

SCHEMA = 1
RETRIES_S = (0.5, 2.0)
Content = bytes | memoryview
NAME = re.compile(r"step_(\d{8,})\.(json|safetensors)")
log = logging.getLogger(__name__)


class Damaged(Exception):
    """A snapshot that does not hold; the message says why."""


class Abandoned(Exception):
    """What a snapshot still lacks can no longer be had: another worker is gone, and the generation with it."""


Rest = Callable[[], dict[str, Any]]  # what else a manifest says; called in the background; may raise Abandoned


@dataclass(frozen=True)
class Snapshot:
    """A manifest and the bytes of the tensor file, checked against it."""

    manifest: dict[str, Any]
    content: bytes

    def tensors(self) -> dict[str, Tensor]:
        return load(self.content)

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors whose names begin with `prefix`, without it."""
        return {name.removeprefix(prefix): tensor for name, tensor in self.tensors().items() if name.startswith(prefix)}


def seal(manifest: dict[str, Any]) -> bytes:
    """The manifest's bytes, with a checksum over everything else in it."""
    body = {key: value for key, value in manifest.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps(body | {"checksum": digest}, indent=1) + "\n").encode()


def unseal(content: bytes) -> dict[str, Any]:
    """The inverse of `seal`. Raises Damaged."""
    try:
        manifest = json.loads(content)
        whole = seal(manifest) == content
    except (ValueError, AttributeError, TypeError):
        whole = False
    if not whole:
        raise Damaged("its manifest is damaged")
    if manifest["schema"] != SCHEMA:
        raise UserError(f"the snapshot of step {manifest['step']} has format {manifest['schema']}, and this program reads format {SCHEMA}")
    return dict(manifest)


def manifest_of(about: dict[str, Any], digest: str, size: int) -> bytes:
    """The manifest's bytes for a tensor file with this SHA-256 and size."""
    return seal({"schema": SCHEMA, **about, "sha256": digest, "bytes": size})


class Folder:
    """The snapshots at one place. Raises UserError if the place has no driver."""

    def __init__(self, url: str) -> None:
        self.url = url
        try:
            self.files, self.root = fsspec.core.url_to_fs(url, use_listings_cache=False) if "://" in url else fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"snapshot.path {url} needs a driver that is not installed: {error}") from None
        self.local = isinstance(self.files, LocalFileSystem)
        self.private = self.files.protocol == "memory"  # no other process sees it

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        self.files.invalidate_cache()
        try:
            return sorted(str(entry).rsplit("/", 1)[-1] for entry in self.files.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def steps(self, kind: str = "json") -> list[int]:
        """Steps for which there is a manifest (or a tensor file), whether it holds or not; newest first."""
        found = (NAME.fullmatch(name) for name in self.names())
        return sorted((int(match[1]) for match in found if match and match[2] == kind), reverse=True)

    def prepare(self) -> None:
        """Make the folder, remove what unfinished writes left. Raises UserError if it cannot be written to."""
        probe = f"probe-{os.getpid()}"
        try:
            self.files.makedirs(self.root, exist_ok=True)
            self.put(probe, b"writable")
            self.files.rm_file(self.path(probe))
            for name in self.names():
                if name.startswith("partial-"):
                    self.files.rm_file(self.path(name))
        except Exception as error:  # each driver raises exceptions of its own
            raise UserError(f"the snapshot folder {self.url} cannot be written to: {type(error).__name__}: {error}") from None

    def put(self, name: str, content: Content) -> None:
        """Write a file so that it is there whole, and durable, or not at all."""
        if not self.local:
            self.upload(name, bytes(content))
            return
        partial, final = self.path(f"partial-{name}"), self.path(name)
        try:
            with open(partial, "wb", buffering=0) as file:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            os.replace(partial, final)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(partial)  # on a full disk, what is left of it would keep the next one out too
            raise
        self.sync()

    def upload(self, name: str, content: bytes) -> None:
        """PUT an object and look whether it is all there; stores fail for moments, so there are a few tries."""
        for pause_s in (*RETRIES_S, None):
            try:
                self.files.pipe_file(self.path(name), content)
                self.files.invalidate_cache()
                if (there := self.files.size(self.path(name))) != len(content):  # s3fs once truncated uploads silently
                    raise OSError(f"{self.url}/{name} has {there} bytes of {len(content)} after writing")
                return
            except Exception as error:  # each driver raises exceptions of its own
                if pause_s is None:
                    raise
                log.info("writing %s/%s failed (%s: %s) and is tried again", self.url, name, type(error).__name__, error)
                time.sleep(pause_s)

    def sync(self) -> None:
        """Make renames and removals durable."""
        if self.local:
            handle = os.open(self.root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def write(self, manifest: dict[str, Any], content: Content) -> None:
        """Save a safetensors file's bytes under `manifest["step"]`; on return they are durable."""
        name = f"step_{manifest['step']:08d}"
        if self.files.exists(self.path(f"{name}.json")):  # its manifest must not speak of the new tensors
            self.remove(manifest["step"])
        self.put(f"{name}.safetensors", content)
        self.put(f"{name}.json", manifest_of(manifest, hashlib.sha256(content).hexdigest(), len(content)))

    def remove(self, step: int) -> None:
        """Delete a snapshot, manifest first."""
        for kind in ("json", "safetensors"):
            if self.files.exists(self.path(name := f"step_{step:08d}.{kind}")):
                self.files.rm_file(self.path(name))
            self.sync()

    def manifest(self, step: int) -> dict[str, Any]:
        """Raises Damaged."""
        try:
            return unseal(self.files.cat_file(self.path(f"step_{step:08d}.json")))
        except FileNotFoundError:
            raise Damaged("its manifest is missing") from None
        except (IsADirectoryError, PermissionError) as error:
            raise Damaged(f"its manifest cannot be read: {error.strerror}") from None

    def read(self, step: int) -> Snapshot:
        """Raises Damaged unless every checksum holds."""
        manifest = self.manifest(step)
        try:
            content = self.files.cat_file(self.path(f"step_{step:08d}.safetensors"))
        except FileNotFoundError:
            raise Damaged("its tensor file is missing") from None
        except (IsADirectoryError, PermissionError) as error:
            raise Damaged(f"its tensor file cannot be read: {error.strerror}") from None
        if len(content) != manifest["bytes"]:
            raise Damaged(f"its tensor file has {len(content):,} bytes instead of {manifest['bytes']:,}")
        if hashlib.sha256(content).hexdigest() != manifest["sha256"]:
            raise Damaged("its tensor file has another SHA-256 than its manifest says")
        return Snapshot(manifest, content)

    def set_aside(self, step: int, reason: str) -> None:
        """Rename what is there of a snapshot, so that it is out of the way and can still be looked at."""
        there, number = self.names(), 1
        while any(name.startswith(f"damaged-{number}-step_{step:08d}.") for name in there):
            number += 1
        aside = f"damaged-{number}-step_{step:08d}."
        for kind in ("safetensors", "json"):
            if (name := f"step_{step:08d}.{kind}") in there:
                try:
                    self.files.mv(self.path(name), self.path(aside + kind))
                except FileNotFoundError:
                    pass  # another node, on the same folder, was faster
        self.sync()
        log.warning("snapshot of step %d set aside as %s*: %s", step, self.path(aside), reason)

    def newest(self) -> tuple[Snapshot | None, dict[int, str]]:
        """The newest snapshot that holds, and what is wrong with each newer one."""
        wrong: dict[int, str] = {}
        for step in sorted({*self.steps("json"), *self.steps("safetensors")}, reverse=True):
            try:
                return self.read(step), wrong
            except Damaged as damage:
                wrong[step] = str(damage)
        return None, wrong


class Writer:
    """Writes snapshots in the background, one at a time, and retires old ones.

    A write that fails is reported and training goes on to the next one; the last one must succeed, see `finish`.
    """

    def __init__(self, folder: Folder, keep_last: int, keep_best: bool) -> None:
        self.folder, self.keep_last, self.keep_best = folder, keep_last, keep_best
        self.losses: dict[int, float | None] = {}  # validation loss at each step that has a snapshot
        self.stage: Stage | None = None
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None
        self.newest = 0  # step of the last one written

    def reserve(self, tensors: Mapping[str, Tensor]) -> Stage:
        """Room for such a state, made before training waits for it."""
        if self.stage is None:
            self.stage = Stage(tensors)
        return self.stage

    def start(self, manifest: dict[str, Any], tensors: Mapping[str, Tensor], rest: Rest = dict) -> None:
        """Copy the tensors and begin to write them; waits for the write before. On return they may change.

        `rest` is called in the background, before anything is written, and gives what else the manifest says.
        """
        if self.thread:
            self.thread.join()
        stage = self.reserve(tensors)
        stage.fill(tensors)
        self.thread = threading.Thread(target=self.write, args=(manifest, stage.content, rest))
        self.thread.start()

    def write(self, manifest: dict[str, Any], content: Content, rest: Rest) -> None:
        try:
            self.folder.write(manifest | rest(), content)
            self.error, self.newest = None, manifest["step"]
        except Abandoned as error:
            self.error = error
            return  # the main thread meets the same end, and says so
        except Exception as error:  # whatever the driver raises: the run goes on, the user is told
            self.error = error
            log.warning("snapshot of step %d could not be written: %s: %s", manifest["step"], type(error).__name__, error)
            return
        try:
            self.retire()
        except Exception as error:  # the new snapshot stands all the same
            log.warning("old snapshots could not be removed: %s: %s", type(error).__name__, error)

    def retire(self) -> None:
        """Delete all but the newest `keep_last` and the best."""
        steps = self.folder.steps()
        for step in steps:
            if step not in self.losses:
                try:
                    self.losses[step] = validation_loss(self.folder.manifest(step))
                except Damaged:
                    self.losses[step] = None
        known = {step: loss for step in steps if (loss := self.losses[step]) is not None}
        best = min(known, key=known.__getitem__, default=None) if self.keep_best else None
        for step in steps[self.keep_last :]:
            if step != best:
                self.folder.remove(step)
        for step in self.folder.steps("safetensors"):
            if step < min(self.folder.steps(), default=0):
                self.folder.remove(step)  # a removal that was cut short

    def idle(self, timeout_s: float) -> bool:
        """Whether the last write is over, after waiting for it at most so long."""
        if self.thread:
            self.thread.join(None if timeout_s == float("inf") else timeout_s)
        return not (self.thread and self.thread.is_alive())

    def finish(self) -> None:
        """Wait until the last snapshot is durable; raises what kept it from being written."""
        if self.thread:
            self.thread.join()
        if self.error:
            raise self.error


def validation_loss(manifest: dict[str, Any]) -> float | None:
    """The validation loss measured at the snapshot's own step."""
    record = manifest["metrics"].get("val", {})
    return record["val/loss"] if record.get("step") == manifest["step"] else None


def open_anywhere(where: str) -> Snapshot:
    """A snapshot by its own path or URL, or the newest of a run folder or snapshot folder. Raises UserError."""
    folder, _, name = where.rstrip("/").rpartition("/")
    if match := NAME.fullmatch(name):
        try:
            return Folder(folder or ".").read(int(match[1]))
        except (Damaged, FileNotFoundError) as error:
            raise UserError(f"the snapshot {where} cannot be used: {error}") from None
    places = [f"{where.rstrip('/')}/snapshots", where]
    if "://" not in where and (written := Path(where) / "config.yaml").is_file():
        try:
            elsewhere = yaml.safe_load(written.read_text(encoding="utf-8"))["snapshot"]["path"]
            places = [elsewhere, *places] if elsewhere else places
        except (yaml.YAMLError, UnicodeDecodeError, TypeError, KeyError):
            log.warning("%s is damaged and passed over", written)
    for place in places:
        found = Folder(place)
        for step in found.steps():
            try:
                return found.read(step)
            except Damaged as damage:
                log.warning("snapshot of step %d in %s passed over: %s", step, place, damage)
    raise UserError(f"there is no snapshot in {where}: give a run folder such as out/default, or a file step_*.safetensors")
