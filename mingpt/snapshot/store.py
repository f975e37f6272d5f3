"""Write, verify and read the snapshots of a run in one place, a folder or any fsspec URL.

`step_00001200.safetensors` holds weights, `step_00001200.optimizer.safetensors` the optimizer's state,
`step_00001200.tokenizer` the tokenizer, and `step_00001200.json`, the manifest, describes these files. The
manifest is written last, when all other files are durable: **a snapshot exists when its manifest exists and
the manifest's checksums match.** Until then an empty file `partial-step_00001200` marks the files of this
step as an unfinished save. In a folder, the name of any file begins with `partial-` while the file is being
written. No pickle is ever loaded.

By default `verify` and `read` check all bytes: each file must have the SHA-256 in the manifest, and in a
run's snapshot all numbers must be finite. `open` itself checks only the manifest, and the files' sizes and
headers. `quarantine` renames the files of a snapshot that must not be used.
"""

import contextlib
import hashlib
import logging
import math
import os
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mingpt.base.errors import ClaimLost, CorruptSnapshot, UnreadableSnapshot, UserError, meaning_of
from mingpt.base.files import PIECE_BYTES, DriverError, reason_of
from mingpt.base.paths import describe_obstacle
from mingpt.config import Config
from mingpt.snapshot.file_store import NO_LOSS, FileStore
from mingpt.snapshot.layout import (
    KINDS,
    LEFTOVER,
    TOKENIZER,
    UNFINISHED,
    Layout,
    TensorSpec,
    file_name,
    files_of,
    is_snapshot_file,
    memory_of,
    step_of,
    steps_in,
    unfinished_name,
)
from mingpt.snapshot.manifest import (
    MAX_BYTES,
    FileRecord,
    Manifest,
    decode_manifest,
    encode_manifest,
    validation_loss,
)
from mingpt.snapshot.reading import Check, SourceFile, StoredFile, TensorFile, accept_all, check_finite

log = logging.getLogger(__name__)


def verify_file(file: StoredFile, sha256: str, is_finite: bool = True) -> None:
    """Read a file once and check all its bytes, in pieces of at most PIECE_BYTES.

    The SHA-256 must be `sha256` (hex); with `is_finite`, the tensors must pass `check_finite`. Raises
    CorruptSnapshot if a check fails or the file is missing, UnreadableSnapshot if it cannot be read.
    """
    digest, hashing = hashlib.sha256(), Future[None]()
    hashing.set_result(None)
    size = min(PIECE_BYTES, file.size)
    buffers = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(2)]
    with ThreadPoolExecutor(max_workers=1) as pool:
        for number, begin in enumerate(range(0, file.size, PIECE_BYTES)):
            piece = buffers[number % 2][: file.size - begin]
            content = memory_of(piece)
            file.file.read_into(begin, content)
            hashing.result()
            hashing = pool.submit(digest.update, content)
            for name, spec in file.specs.items() if is_finite else ():
                low = max(file.begins[name] - begin, 0)
                high = min(file.begins[name] - begin + spec.nbytes, len(piece))
                if low < high:
                    check_finite(name, piece[low:high].view(spec.dtype))
        hashing.result()
    if digest.hexdigest() != sha256:
        raise CorruptSnapshot(f"{file.file.what} does not have the SHA-256 in its manifest")


class Snapshot:
    """Reads single tensors from the files of a snapshot, without verifying the files' checksums.

    The methods that read raise UnreadableSnapshot or CorruptSnapshot.
    """

    def __init__(self, manifest: Manifest, files: Sequence[StoredFile]) -> None:
        self.manifest, self.files = manifest, list(files)
        self.tensor_files = [file for file in files if isinstance(file, TensorFile)]
        self.file_of = {name: file for file in self.tensor_files for name in file.specs}

    @property
    def entries(self) -> dict[str, TensorSpec]:
        """The type and shape of each tensor, by name."""
        return {name: file.specs[name] for name, file in self.file_of.items()}

    @property
    def config(self) -> Config:
        """The configuration in the manifest; settings that are missing there have their defaults."""
        return self.manifest.settings

    def read(self, name: str) -> Tensor:
        """Return the tensor `name`. Raises KeyError if the snapshot has no such tensor."""
        return self.file_of[name].read(name)

    def read_tokenizer(self) -> bytes | None:
        """Return the bytes of the snapshot's tokenizer; None if it has no tokenizer."""
        for file in self.files:
            if not isinstance(file, TensorFile):
                return file.file.read(0, file.size)
        return None

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """Read the tensors whose names begin with `prefix`; return them by name, without the prefix."""
        return {
            name.removeprefix(prefix): self.read(name) for name in self.file_of if name.startswith(prefix)
        }


class Store(FileStore):
    """Reads and writes the snapshots at `url`; the constructor's arguments are those of FileStore."""

    def steps(self, kind: str = "json") -> list[int]:
        """Return the steps that have a manifest, newest first. Raises the errors of `names`.

        With `kind` "safetensors", return the steps that have any other file of a snapshot.
        """
        return steps_in(self.names(), kind)

    def has_manifest(self, step: int) -> bool:
        """Return whether `step` has a manifest. Raises OSError or an error of fsspec's driver.

        Asks fsspec for this file, because a listing may be out of date. Calls `info`, because fsspec's
        `exists` returns False after any error of a local disk, and callers then remove the files of `step`.
        """
        try:
            self.files.info(self.path(file_name(step, "json")))
        except FileNotFoundError:
            return False
        return True

    def possible_steps(self) -> list[int]:
        """Return the steps that may have a snapshot, newest first, without those of unfinished saves.

        Raises UnreadableSnapshot if the folder cannot be listed.
        """
        names = {*self.list_names(), *self.list_names()}  # a first listing may be out of date
        unfinished = {*unfinished_steps(names)} - {*steps_in(names, "json")}
        return [step for step in steps_in(names) if step not in unfinished]

    def losses_of(self, steps: Iterable[int]) -> dict[int, float]:
        """Return {step: validation loss} for those of `steps` that are not in `unreadable`.

        The loss is infinite if it was not measured at that step, or if the manifest is missing or damaged. A
        step whose manifest is unreadable, or of another version, is logged, left out and put in `unreadable`.
        """
        losses = dict[int, float]()
        for step in {*steps} - self.unreadable:
            try:
                loss = validation_loss(self.read_manifest(step))
                losses[step] = math.inf if loss is None else loss
            except CorruptSnapshot:
                losses[step] = math.inf
            except (UnreadableSnapshot, UserError) as error:  # or of another version
                log.warning(f"snapshot of step {step} in {self.url} skipped: {error}")
                self.unreadable.add(step)
        return losses

    def find_best(self, steps: Iterable[int]) -> None:
        """Set `best` to (lowest validation loss of `steps`, its step), or to NO_LOSS if none is known."""
        pairs = [(loss, step) for step, loss in self.losses_of(steps).items()]
        self.best = min([NO_LOSS, *pairs])

    def prepare(self) -> None:
        """Create the folder, remove the files of unfinished saves there, and write a file as a test.

        Raises UserError if the folder cannot be listed or written to. A full disk is only logged, because
        there may be room again by the time of a save. Call this only while the job holds the claim (the right
        to write to the folder). Raises ClaimLost if the claim is lost.
        """
        probe = f"probe-{uuid.uuid4().hex}"
        try:
            self.files.makedirs(self.root, exist_ok=True)
            names = self.names()
            for step in unfinished_steps(names):
                if not self.has_manifest(step):
                    self.remove(step)
            for name in filter(LEFTOVER.fullmatch, names):
                self.remove_file(name)
            try:
                self.write_atomic(probe, b"writable")
            finally:
                self.remove_file(probe)
        except ClaimLost:
            raise
        except DriverError as error:
            if meaning_of(error) == "full":
                log.warning(f"there is no room for snapshots in {self.url} ({reason_of(error)})")
                return
            raise UserError(
                f"the snapshot folder {self.url} cannot be written to: {describe_obstacle(self.url, error)}"
            ) from None

    def begin(self, step: int) -> None:
        """Prepare to save `step`. Call this on one rank of those that see the folder.

        If the step has a manifest, the caller must write the same state over each file, so that the snapshot
        stays valid. Otherwise the step is marked as unfinished, and files of an earlier attempt are removed.
        Raises the errors of `write_stream`.
        """
        self.check_claim()
        if self.is_local:
            os.makedirs(self.root, exist_ok=True)  # on a full disk, `prepare` could not create it
        if not self.has_manifest(step):
            self.write_atomic(unfinished_name(step), b"")
            self.remove_files(step)

    def write_file(self, layout: Layout, chunks: Iterable[memoryview]) -> FileRecord:
        """Write a tensor file from `chunks`, which include the header; return the file's record.

        `layout` has the file's name and size. Raises the errors of `write_stream`.
        """
        sha256 = self.write_stream(layout.name, chunks, layout.size)
        return FileRecord(name=layout.name, sha256=sha256, bytes=layout.size)

    def write_tokenizer(self, step: int, content: bytes) -> FileRecord:
        """Write the tokenizer file of `step`, as `write_file` writes a tensor file; return its record."""
        name = file_name(step, TOKENIZER)
        sha256 = self.write_stream(name, [memoryview(content)], len(content))
        return FileRecord(name=name, sha256=sha256, bytes=len(content))

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, which makes the files of its step a snapshot, as `write_stream` writes a file.

        Then removes the mark of an unfinished save; a failure of that is only logged. Raises UserError if the
        manifest would be too large, and the errors of `write_stream`.
        """
        step = manifest.step
        self.write_atomic(file_name(step, "json"), encode_manifest(manifest))
        self.unreadable.discard(step)
        try:
            self.remove_file(unfinished_name(step))
        except DriverError as error:  # the snapshot is valid
            log.info(f"{unfinished_name(step)} is left in {self.url} ({reason_of(error)})")

    def remove(self, step: int) -> None:
        """Delete the files of `step`, except one that a killed process was writing, which `prepare` deletes.

        First the manifest becomes a mark of an unfinished save. Raises ClaimLost, OSError or an error of
        fsspec's driver.
        """
        self.check_claim()
        with contextlib.suppress(FileNotFoundError):  # the manifest becomes a mark: these files are to go
            self.rename(file_name(step, "json"), unfinished_name(step))
        self.remove_files(step)
        self.remove_file(unfinished_name(step))

    def remove_files(self, step: int) -> None:
        """Remove the files of `step`, but not the mark of an unfinished save.

        Call this if `step` has no manifest. Raises OSError or an error of fsspec's driver.
        """
        self.fsync_folder()  # first it must be certain that these files are no snapshot
        for name in files_of(self.names(), step):
            self.remove_file(name)  # the file may be gone: a listing may be out of date
        self.fsync_folder()

    def discard(self, step: int) -> None:
        """Remove the files of a failed save of `step`, to free their space, if the step has no manifest.

        Never raises: a failure is only logged, and a lost claim is ignored.
        """
        try:
            if not self.has_manifest(step):
                self.remove(step)
        except ClaimLost:
            pass  # the job that has taken over decides about the files
        except DriverError as error:
            why = reason_of(error)
            log.info(f"files of step {step} are left in {self.url} until the next start ({why})")

    def prune(self, keep: int, keep_best: bool, replayed_step: int | None) -> None:
        """Delete old snapshots, and the files of older steps without a manifest. Also sets `best`.

        The `keep` newest snapshots stay. With `keep_best`, that with the lowest validation loss stays, too.
        `replayed_step` is the last step at which the workers agreed (replay.py), or None: the newest snapshot
        up to this step also stays. Snapshots in `unreadable` are neither counted nor deleted. Raises the
        errors of `remove`.
        """
        names = self.names()
        complete = steps_in(names, "json")
        self.find_best(complete)
        steps = [step for step in complete if step not in self.unreadable]
        replayed = [step for step in steps if replayed_step is not None and step <= replayed_step]
        kept = {*steps[:keep], *replayed[:1], *([self.best[1]] if keep_best else [])}
        for step in steps:
            if step not in kept:
                self.remove(step)
        if not keep_best:
            self.find_best(kept)
        # Remove what interrupted removals have left. A listing may be out of date: ask for the manifest.
        for step in unfinished_steps(names):
            if step < max(complete, default=0) and not self.has_manifest(step):
                self.remove(step)

    def clear(self, kept: int = -1) -> None:
        """Remove all snapshots but that of the step `kept`, then the local folder if it is empty.

        Files set aside or not finished are removed, too. Files whose names match no pattern of
        `is_snapshot_file` stay. Raises OSError or an error of fsspec's driver.
        """
        for name in filter(is_snapshot_file, self.names()):
            if step_of(name) != kept:
                self.remove_file(name)
        if self.is_local:
            with contextlib.suppress(OSError):
                os.rmdir(self.root)

    def file(self, name: str, what: str) -> SourceFile:
        """Return the file `name` for reading; messages call it `what`."""
        return SourceFile(self.files, self.path(name), what, self.retries_s)

    def read_manifest(self, step: int) -> Manifest:
        """Return the checked manifest of a step.

        Raises CorruptSnapshot if the manifest is missing or wrong, and UnreadableSnapshot if the manifest
        cannot be read. Raises UserError if the schema version is unknown.
        """
        file = self.file(file_name(step, "json"), "its manifest")
        size = file.size()
        if size > MAX_BYTES:
            raise CorruptSnapshot(f"its manifest has {size:,} bytes, more than {MAX_BYTES:,}")
        manifest = decode_manifest(file.read(0, size))
        if manifest.step != step:
            raise CorruptSnapshot(f"its manifest is that of step {manifest.step}")
        return manifest

    def open(self, step: int, check: Check = accept_all) -> Snapshot:
        """Check the manifest, file sizes and headers of `step`, call `check`, and return the snapshot.

        No weights are read. Raises the errors of `check` and of `read_manifest`. Raises CorruptSnapshot if
        another file is missing or its size or header is wrong, UnreadableSnapshot if it cannot be read.
        """
        manifest, files = self.read_manifest(step), []
        for record in manifest.files:
            kind = StoredFile if record.name == file_name(step, TOKENIZER) else TensorFile
            files.append(kind(self.file(record.name, f"its file {record.name}"), record.bytes))
        snapshot = Snapshot(manifest, files)
        check(manifest, snapshot.entries, snapshot.read_tokenizer())
        return snapshot

    def verify(self, snapshot: Snapshot, weights_only: bool = False) -> None:
        """Read each file once and check all its bytes; with `weights_only`, leave out the optimizer's state.

        Raises CorruptSnapshot or UnreadableSnapshot. The files are read at the same time, each in pieces of
        at most PIECE_BYTES. Only in a run's snapshot must the numbers be finite, not in that of a Checkpoint.
        """
        manifest = snapshot.manifest
        is_of_run = "config" in manifest.model_fields_set  # the numbers of another loop may be any
        left_out = file_name(manifest.step, KINDS[1]) if weights_only else None
        with ThreadPoolExecutor() as pool:
            checks = [
                pool.submit(verify_file, file, record.sha256, is_of_run)
                for file, record in zip(snapshot.files, manifest.files, strict=True)
                if record.name != left_out
            ]
        for check in checks:
            check.result()  # raises the error of a file's check

    def read(self, step: int, check: Check = accept_all, weights_only: bool = False) -> Snapshot:
        """Open and verify the snapshot of `step`, and return it.

        For the arguments and the errors see `open` and `verify`.
        """
        snapshot = self.open(step, check)
        self.verify(snapshot, weights_only)
        return snapshot

    def quarantine(self, step: int, reason: str, kind: str = "damaged") -> None:
        """Rename the files of the snapshot of `step`, so that no run uses them; log the reason.

        The new names are <kind>-<number>-<old name>, with a number for which no such file exists. Raises
        OSError or an error of fsspec's driver.
        """
        names, number = self.names(), 1
        while any(name.startswith(f"{kind}-{number}-step_{step:08d}") for name in names):
            number += 1
        target = f"{kind}-{number}-"
        for name in files_of(names, step):
            with contextlib.suppress(FileNotFoundError):  # another node, on the same folder, was faster
                self.rename(name, target + name)
        self.fsync_folder()
        log.warning(
            f"snapshot of step {step} set aside as {self.path(f'{target}step_{step:08d}.')}*: {reason}"
        )


def unfinished_steps(names: Iterable[str]) -> list[int]:
    """Return the steps that files in `names` mark as unfinished saves.

    Such a save may be complete all the same, if its mark was not removed.
    """
    matches = (UNFINISHED.fullmatch(name) for name in names)
    return [int(match[1]) for match in matches if match]
