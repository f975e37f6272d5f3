"""Read and write files in a folder or at an fsspec URL. In a folder or object store they appear whole.

In a folder a file is written under another name, fsynced and renamed. At a URL a small file is uploaded by a
single PUT, a large file in parts (S3's multipart upload): the object appears when the upload is completed.

S3 keeps, and charges for, the parts of an unfinished upload until it is aborted. An upload that fails is
aborted at once. The upload of a killed process stays: a lifecycle rule of the bucket removes it
(AbortIncompleteMultipartUpload).
"""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from mingpt.base import events
from mingpt.base.errors import ClaimLost, CorruptSnapshot, UnreadableSnapshot
from mingpt.base.files import (
    PIECE_BYTES,
    RETRIES_S,
    DriverError,
    atomic_file,
    fsync_path,
    reason_of,
    retry,
    write_all,
)
from mingpt.base.urls import open_url
from mingpt.snapshot.reading import with_retries

UPLOAD_PART_BYTES = PIECE_BYTES  # S3 takes at most 10,000 parts of a file: 156 GiB
FLUSH_BYTES = 64 << 20
Content = bytes | memoryview
log = logging.getLogger(__name__)


def discard(file: Any, path: str) -> None:
    """Abort an object's upload, so that no object appears; close any other file. Errors are logged."""
    try:
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # closing the file, also by garbage collection, would complete the upload
            file.discard()
        else:
            file.close()
    except DriverError as error:
        log.warning(f"the upload of {path} could not be aborted ({reason_of(error)})")


def write_chunks(
    file: Any, chunks: Iterable[memoryview], name: str, size: int, handle: int | None = None
) -> str:
    """Write `chunks`, `size` bytes in all, to `file` and hash them meanwhile; returns their SHA-256 in hex.

    `name` is the file's name in progress events. `handle` is the descriptor of a local file: a thread flushes
    it meanwhile, so that the caller's fsync has little left to do. Raises the errors of writing and flushing.
    """
    digest, written, flushed, flushing = hashlib.sha256(), 0, 0, Future[None]()
    flushing.set_result(None)
    with ThreadPoolExecutor(max_workers=2) as pool:
        for chunk in chunks:
            hashing = pool.submit(digest.update, chunk)
            write_all(file.write, chunk)
            hashing.result()
            written += len(chunk)
            if handle is not None and written - flushed >= FLUSH_BYTES and flushing.done():
                flushing.result()
                flushed, flushing = written, pool.submit(os.fdatasync, handle)
            events.emit("file_progress", name=name, written=written, size=size)
        flushing.result()
    assert written == size, f"{name} has {written} bytes instead of {size}"
    return digest.hexdigest()


class FileStore:
    """Reads and writes the files at `url`, a path or URL. Raises UserError if its driver is not installed.

    A failed read, or upload to a URL, is tried again after pauses of `retries_s` seconds. Files of more than
    `upload_part_bytes` are uploaded in parts. `check_claim` is called before a file appears; it raises
    ClaimLost if this job no longer has the claim (the right to write there). By default it does nothing.
    """

    def __init__(
        self,
        url: str,
        retries_s: tuple[float, ...] = RETRIES_S,
        upload_part_bytes: int = UPLOAD_PART_BYTES,
        check_claim: Callable[[], None] = lambda: None,
    ) -> None:
        self.url, self.retries_s, self.upload_part_bytes = url, retries_s, upload_part_bytes
        self.files, self.root = open_url(url, f"snapshot.path {url}")
        self.is_local = isinstance(self.files, LocalFileSystem)
        self.is_process_private = self.files.protocol == "memory"
        self.check_claim = check_claim
        self.is_ready = True  # false after a failure to prepare the folder
        self.unreadable: dict[int, str] = {}  # snapshots: step -> reason; never pruned, as they may be valid

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        """Return the sorted names of all files and folders at `url`; an empty list if it does not exist."""
        self.files.invalidate_cache()
        try:
            return sorted(str(entry).rsplit("/", 1)[-1] for entry in self.files.ls(self.root, detail=False))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def list_names(self) -> list[str]:
        """Return the same as `names`, with retries. Raises UnreadableSnapshot if the last attempt fails."""
        try:
            return with_retries(self.names, f"the folder {self.url}", self.retries_s)
        except CorruptSnapshot as error:  # a loop of symbolic links
            raise UnreadableSnapshot(str(error)) from None

    def write_atomic(self, name: str, content: Content) -> None:
        """Write a file so that it appears whole and durable, or not at all. Errors: see `write_stream`."""
        self.write_stream(name, [memoryview(content)], len(content))

    def write_stream(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Write a file atomically from `chunks`, `size` bytes in all; returns their SHA-256 in hex digits.

        The file is durable on return. An earlier file of this name is replaced. Raises ClaimLost if this job
        has lost the right to write, OSError, or a driver's error. A failed upload is tried again, unless
        `chunks` is an iterator, which can be read only once.
        """
        if not self.is_local:
            self.check_claim()
            return self.upload(name, chunks, size)
        partial, final = self.path(f"partial-{name}"), self.path(name)
        events.emit("file_write", name=name, path=partial, size=size)
        with atomic_file(final, partial, before_rename=self.check_claim) as file:
            return write_chunks(file, chunks, name, size, file.fileno())

    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Upload an object and check its size; returns its SHA-256. Raises and retries as `write_stream`.

        The caller checks the claim first. An upload in parts checks it again before the object appears.
        """

        def on_failure(error: Exception) -> None:
            if isinstance(error, ClaimLost):
                raise error
            log.info(f"writing {self.url}/{name} failed ({reason_of(error)}) and is retried")

        pauses_s = () if iter(chunks) is chunks else self.retries_s
        return retry(lambda: self.upload_once(name, chunks, size), pauses_s, on_failure)

    def upload_once(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        path = self.path(name)
        if size <= self.upload_part_bytes:
            content = b"".join([bytes(chunk) for chunk in chunks])
            sha256 = hashlib.sha256(content).hexdigest()
            self.files.pipe_file(path, content)
        else:
            file = self.files.open(path, "wb", block_size=self.upload_part_bytes)
            try:
                sha256 = write_chunks(file, chunks, name, size)
                self.check_claim()
                file.close()  # now the object appears
            except BaseException:
                discard(file, path)
                raise
        self.files.invalidate_cache()
        written = self.files.size(path)
        if written != size:  # s3fs once truncated uploads silently
            raise OSError(f"{self.url}/{name} has {written} bytes of {size} after writing")
        return sha256

    def remove_file(self, name: str) -> None:
        """Remove a file, if it exists. In a local folder, `fsync_folder` then makes the removal durable."""
        with contextlib.suppress(FileNotFoundError):
            self.files.rm_file(self.path(name))

    def fsync_folder(self) -> None:
        """Make renames and removals in a folder on disk durable; at a URL, do nothing."""
        if self.is_local:
            fsync_path(self.root)
