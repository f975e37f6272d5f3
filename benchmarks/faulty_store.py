"""An object store in memory that goes wrong at a given call, or from it on, for crash_points.py."""

import io
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

FAULTS = ("fails once", "fails on", "tears", "tears and says so", "lists late")


class FaultyUpload(AbstractBufferedFile):  # type: ignore[misc]
    """An upload in parts: the object appears when it is closed. Its calls count as its FaultyStore's."""

    def _initiate_upload(self) -> None:
        self.fs.count_call()
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        part, is_the_one = self.buffer.getvalue(), self.fs.count_call()
        if is_the_one and self.fs.fault.startswith("tears"):
            part = part[: len(part) // 2]
        self.parts.append(part)
        if is_the_one and self.fs.fault == "tears and says so":
            raise OSError("connection lost")
        if final:
            self.fs.put(self.path, b"".join(self.parts))
        return True

    def discard(self) -> None:
        self.fs.count_call()
        self.buffer = io.BytesIO()


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """A store whose `at`-th call, counted while `armed`, has the fault:

    "fails once": the call raises; "fails on": all calls from it on raise; "tears": an upload stores one half;
    "tears and says so": it also raises; "lists late": all listings from it on are the listing before it.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.armed, self.calls, self.at, self.fault = False, 0, -1, ""
        self.last_listing: list[str] | None = None

    def count_call(self) -> bool:
        """Whether this call has the fault; raises OSError if it must fail."""
        if not self.armed:
            return False
        self.calls += 1
        fails_once = self.fault == "fails once" and self.calls == self.at
        fails_on = self.fault == "fails on" and self.calls >= self.at
        if fails_once or fails_on:
            raise OSError(f"503 on call {self.calls}")
        return self.calls == self.at

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        is_the_one = self.count_call()
        if not (is_the_one and self.fault.startswith("tears")):
            super().pipe_file(path, value, mode=mode, **options)
            return
        super().pipe_file(path, value[: len(value) // 2], mode=mode, **options)
        if self.fault == "tears and says so":
            raise OSError("connection lost")

    def put(self, path: str, value: bytes) -> None:
        """Store an object without faults."""
        super().pipe_file(path, value)

    def open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode == "wb" and "data" not in options:
            return FaultyUpload(self, self._strip_protocol(path), mode, block_size)
        return super().open(path, mode, block_size, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.count_call()
        return bytes(super().cat_file(path, start, end, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        self.count_call()
        listing = super().ls(path, detail=False, **options)
        before, is_reached = self.last_listing, self.calls >= self.at
        if not (self.armed and is_reached):
            self.last_listing = listing
        if self.fault == "lists late" and is_reached and before is not None:
            listing = before
        return [{"name": name, "type": "file", "size": 0} for name in listing] if detail else listing

    def size(self, path: str) -> int:
        self.count_call()
        return int(super().size(path))

    def exists(self, path: str, **options: Any) -> bool:
        self.count_call()
        return bool(super().exists(path, **options))

    def rm_file(self, path: str) -> None:
        self.count_call()
        super().rm_file(path)
