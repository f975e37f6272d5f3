"""Write files to a folder or an fsspec URL, where possible so that a file appears only when it is whole.

In a folder, a file is written under a temporary name, fsynced and renamed. For a URL that names no local
folder, the content is written to a file in TMPDIR, and fsspec's driver uploads this file. An object appears
in an object store when its upload is complete.

S3 keeps, and charges for, the parts of an unfinished upload until the upload is aborted. s3fs may abort an
upload that fails, but a killed process aborts nothing: give the bucket a lifecycle rule
(AbortIncompleteMultipartUpload) that removes such parts.
"""

import contextlib
import hashlib
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from mingpt.base import events
from mingpt.base.errors import UnreadableSnapshot, UserError
from mingpt.base.files import (
    RETRIES_S,
    DriverError,
    atomic_file,
    fsync_path,
    reason_of,
    retry,
    temporary_folder,
    write_all,
)
from mingpt.base.urls import open_url

NO_LOSS = math.inf, -1  # stands for (validation loss, step) if no snapshot has a validation loss
MAX_UNHASHED = 16  # chunks, which are kept meanwhile if another rank has sent them
Content = bytes | memoryview
log = logging.getLogger(__name__)


def write_chunks(file: Any, chunks: Iterable[memoryview], name: str, size: int) -> str:
    """Write `chunks`, `size` bytes in all, to `file`; return the SHA-256 of these bytes, in hex.

    Hashing may be MAX_UNHASHED chunks behind writing; these chunks are kept in memory. `name` is the file's
    name in progress events. Raises the errors of `chunks` and of writing.
    """
    digest, written, hashing = hashlib.sha256(), 0, deque[Future[None]]()
    with ThreadPoolExecutor(max_workers=1) as pool:
        for chunk in chunks:
            try:
                hashing.append(pool.submit(digest.update, chunk))
            except RuntimeError:  # the main thread has ended: Python starts no threads any more
                wait(hashing)
                digest.update(chunk)
            if len(hashing) > MAX_UNHASHED:
                hashing.popleft().result()
            write_all(file.write, chunk)
            written += len(chunk)
            events.emit("file_progress", name=name, written=written, size=size)
        for last in hashing:
            last.result()
    assert written == size, f"{name} has {written} bytes instead of {size}"
    return digest.hexdigest()


class FileStore:
    """Writes, lists and removes the files at `url`, a folder or an fsspec URL.

    `retries_s` has the pauses, in seconds, after which a failed attempt to list files, or to upload one, is
    repeated. `check_claim` is called before a written file is uploaded or gets its final name. `check_claim`
    must raise ClaimLost if this job no longer has the claim (the right to write at `url`). The constructor
    raises UserError if no driver for the URL is installed. A driver that connects may raise its own errors.
    """

    def __init__(
        self,
        url: str,
        retries_s: tuple[float, ...] = RETRIES_S,
        check_claim: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, self.retries_s = url, retries_s
        self.files, self.root = open_url(url, f"snapshot.path {url}")
        self.is_local = isinstance(self.files, LocalFileSystem)
        self.is_process_private = self.files.protocol == "memory"
        self.check_claim = check_claim
        # Steps whose snapshots could not be read. Such a snapshot is never deleted: it may be valid.
        self.unreadable: set[int] = set()
        # (the lowest validation loss of a snapshot that is kept, that snapshot's step)
        self.best: tuple[float, int] = NO_LOSS

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Return the names of all files and folders at `url`, sorted; [] if `url` does not exist.

        Raises OSError or an error of fsspec's driver if the last attempt to list the folder fails.
        """
        return retry(
            self.list_once,
            self.retries_s,
            lambda error: log.info(f"{self.url} cannot be listed ({reason_of(error)}); trying again"),
        )

    def list_once(self) -> list[str]:
        """Return what `names` returns, or raise its errors, after a single attempt."""
        self.files.invalidate_cache()
        try:
            return sorted(str(entry).rsplit("/", 1)[-1] for entry in self.files.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def list_names(self) -> list[str]:
        """Return what `names` returns. Raises UnreadableSnapshot if `url` cannot be listed."""
        try:
            return self.names()
        except DriverError as error:
            raise UnreadableSnapshot(f"the folder {self.url} cannot be read: {reason_of(error)}") from None

    def write_atomic(self, name: str, content: Content) -> None:
        """Write `content` to the file `name`, as `write_stream` does; raise the errors of `write_stream`."""
        self.write_stream(name, [memoryview(content)], len(content))

    def write_stream(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Write the file `name` from `chunks`, `size` bytes in all; return the file's SHA-256 in hex.

        Before the return, fsync is called for the file and its folder; at a URL, the upload is complete. An
        earlier file of this name is replaced. Raises ClaimLost if this job has lost the claim (the right to
        write at `url`). Raises UserError if the file to be uploaded cannot be written to TMPDIR. Raises
        OSError or an error of fsspec's driver if the write or the upload fails. Also raises the errors of
        `chunks`.
        """
        partial, final = self.path(f"partial-{name}"), self.path(name)
        if self.is_local:
            events.emit("file_write", name=name, path=partial, size=size)
            with atomic_file(final, partial, before_rename=self.check_claim) as file:
                return write_chunks(file, chunks, name, size)

        def on_failure(error: Exception) -> None:
            log.info(f"writing {self.url}/{name} failed ({reason_of(error)}) and is retried")

        with temporary_folder() as folder:
            local = Path(folder) / name
            try:
                with open(local, "wb", buffering=0) as file:
                    sha256 = write_chunks(file, chunks, name, size)
            except OSError as error:
                raise UserError(
                    f"no snapshot can be kept in TMPDIR until it is uploaded ({reason_of(error)}): set "
                    "TMPDIR to a folder with room for its larger file"
                ) from error
            self.check_claim()
            retry(lambda: self.upload(local, final), self.retries_s, on_failure)
        return sha256

    def upload(self, local: Path, path: str) -> None:
        """Upload the file `local` to `path`, the full path in fsspec's file system, in a single attempt.

        Raises the errors of fsspec's driver, or OSError if the uploaded file then has a different size.
        """
        self.files.put_file(str(local), path)
        self.files.invalidate_cache()
        written, size = self.files.size(path), local.stat().st_size
        if written != size:  # s3fs once truncated uploads silently
            raise OSError(f"{path} has {written} bytes of {size} after writing")

    def remove_file(self, name: str) -> None:
        """Remove the file `name` if it exists. On a disk the removal is durable only after `fsync_folder`."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self.path(name))

    def rename(self, name: str, new: str) -> None:
        """Rename the file `name` to `new`; on a disk, `name` may also be a folder.

        At a URL, the driver may copy and remove the file. Raises OSError or an error of fsspec's driver.
        """
        if self.is_local:  # the driver of fsspec before 2024.5 copies, and a folder fails
            os.rename(self.path(name), self.path(new))
        else:
            self.files.mv(self.path(name), self.path(new))

    def fsync_folder(self) -> None:
        """Fsync the folder, if it is local, to make earlier renames and removals durable. Raises OSError."""
        if self.is_local:
            fsync_path(self.root)
