"""Files in a folder or at any fsspec URL, which appear whole or not at all.

In a folder a file is written under another name, fsynced and renamed. Elsewhere a small one goes up by a
single PUT, a large one in parts (S3's multipart upload), which become an object when all have arrived.
"""

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from mingpt import events
from mingpt.errors import ClaimLost, CorruptSnapshot, UnreadableSnapshot, UserError
from mingpt.snapshot.reading import with_retries
from mingpt.snapshot.uploads import abort_unfinished_uploads, discard

RETRIES_S = (0.5, 2.0)
UPLOAD_PART_BYTES = 16 << 20
MAX_UPLOAD_PARTS = 9_000  # S3 takes 10,000
STALE_UPLOAD_S = 300.0  # another rank may have begun a younger one
FLUSH_BYTES = 64 << 20
IN_TURN_BYTES = 1 << 20
Content = bytes | memoryview
log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where bytes are written to."""

    def write(self, content: Content, /) -> int | None: ...


class FileStore:
    """The files at `url`. Raises UserError if no driver for it is installed.

    Reading that fails, and an upload to an object store, is retried after each of `retries_s` seconds. Files
    of more than `upload_part_bytes` go up in parts.
    """

    def __init__(
        self,
        url: str,
        retries_s: tuple[float, ...] = RETRIES_S,
        upload_part_bytes: int = UPLOAD_PART_BYTES,
    ) -> None:
        self.url, self.retries_s, self.upload_part_bytes = url, retries_s, upload_part_bytes
        try:
            options = {"use_listings_cache": False} if "://" in url else {}
            self.files, self.root = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError) as error:
            raise UserError(f"snapshot.path {url} needs a driver that is not installed: {error}") from None
        self.is_local = isinstance(self.files, LocalFileSystem)
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

    def list_names(self) -> list[str]:
        """As `names`, with retries. Raises UnreadableSnapshot if the folder cannot be read."""
        try:
            return with_retries(self.names, f"the folder {self.url}", self.retries_s)
        except CorruptSnapshot as error:  # a loop of links
            raise UnreadableSnapshot(str(error)) from None

    def write_atomic(self, name: str, content: Content) -> None:
        """Write a file so that it is there whole, and durable, or not at all."""
        self.write_stream(name, [memoryview(content)], len(content))

    def write_stream(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """As `write_atomic`, from chunks of `size` bytes together; returns their SHA-256.

        A chunk may change once the next one is asked for. An upload that fails is tried again, unless
        `chunks` is an iterator: then whoever makes it may try again.
        """
        if not self.is_local:
            self.check_claim()
            return self.upload(name, chunks, size)
        partial, final = self.path(f"partial-{name}"), self.path(name)
        events.emit("file_write", name=name, path=partial, size=size)
        try:
            with open(partial, "wb", buffering=0) as file:
                sha256 = Stream(file, name, size, file.fileno()).write(chunks)
                os.fsync(file.fileno())
            self.check_claim()
            os.replace(partial, final)
        except BaseException as error:
            self.unlink_partial(partial, error)
            raise
        self.fsync_folder()
        return sha256

    def unlink_partial(self, path: str, reason: BaseException) -> None:
        """What is left of a file would take the next snapshot's room on a full disk."""
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            log.info("%s is left after %s (%s)", path, type(reason).__name__, error.strerror)

    def upload(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        """Upload an object and check its size; object stores have short failures, so it is retried."""
        can_repeat = iter(chunks) is not chunks
        for pause_s in (*self.retries_s, None):
            try:
                return self.upload_once(name, chunks, size)
            except ClaimLost:
                raise
            except Exception as error:  # each driver raises exceptions of its own
                if pause_s is None or not can_repeat:
                    raise
                reason = f"{type(error).__name__}: {error}"
                log.info("writing %s/%s failed (%s) and is retried", self.url, name, reason)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")

    def upload_once(self, name: str, chunks: Iterable[memoryview], size: int) -> str:
        path = self.path(name)
        if size <= self.upload_part_bytes:
            content = b"".join([bytes(chunk) for chunk in chunks])
            assert len(content) == size, f"{name} has {len(content)} bytes instead of {size}"
            sha256 = hashlib.sha256(content).hexdigest()
            self.files.pipe_file(path, content)
        else:
            part_bytes = max(self.upload_part_bytes, -(-size // MAX_UPLOAD_PARTS))
            file = self.files.open(path, "wb", block_size=part_bytes)
            try:
                sha256 = Stream(file, name, size).write(chunks)
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
        """Remove a file that may not be there."""
        path = self.path(name)
        is_there = self.files.exists(path) or (self.is_local and os.path.islink(path))
        if is_there:
            self.files.rm_file(path)

    def abort_unfinished_uploads(
        self, older_than_s: float | None = STALE_UPLOAD_S, prefix: str = "step_"
    ) -> None:
        """In S3, free the parts of uploads that will not be completed; see uploads.py."""
        abort_unfinished_uploads(self.files, self.path(prefix), older_than_s)

    def fsync_folder(self) -> None:
        """Make renames and removals durable."""
        if self.is_local:
            handle = os.open(self.root, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


class Stream:
    """Hashes chunks and writes them to `sink` at the rate of the slower of both.

    With a `handle`, a thread flushes what is written to disk meanwhile, so that little is left for the last
    fsync.
    """

    def __init__(self, sink: Sink, name: str, size: int, handle: int | None = None) -> None:
        self.sink, self.name, self.size, self.handle = sink, name, size, handle
        self.digest, self.written = hashlib.sha256(), 0
        self.flushed, self.flushing = 0, Future[None]()  # bytes at the last flush; the flush under way
        self.flushing.set_result(None)

    def write(self, chunks: Iterable[memoryview]) -> str:
        """Their SHA-256. A chunk may change once the next one is asked for. Raises what the sink raises."""
        with ThreadPoolExecutor(max_workers=2) as pool:
            for chunk in chunks:
                if len(chunk) < IN_TURN_BYTES:
                    self.digest.update(chunk)
                    self.write_all(chunk)
                else:
                    hashing = pool.submit(self.digest.update, chunk)
                    self.write_all(chunk)
                    hashing.result()
                self.flush(pool)
                events.emit("file_progress", name=self.name, written=self.written, size=self.size)
            self.flushing.result()
        assert self.written == self.size, f"{self.name} has {self.written} bytes instead of {self.size}"
        return self.digest.hexdigest()

    def write_all(self, chunk: memoryview) -> None:
        remaining = chunk
        while remaining:
            count = self.sink.write(remaining) or 0
            remaining = remaining[count:]
        self.written += len(chunk)

    def flush(self, pool: ThreadPoolExecutor) -> None:
        """Begin to flush, if enough is written since the last flush and that is over."""
        if self.handle is None or self.written - self.flushed < FLUSH_BYTES or not self.flushing.done():
            return
        self.flushing.result()
        self.flushed = self.written
        self.flushing = pool.submit(os.fdatasync, self.handle)
