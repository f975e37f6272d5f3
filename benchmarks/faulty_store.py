"""An object store in memory for crash_points.py, with a fault at a chosen call."""

from pathlib import Path
from typing import Any

from fsspec.implementations.memory import MemoryFileSystem

FAULTS = ("fails once", "fails on", "tears", "tears and says so", "lists late")


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """A store with a fault at call number `at`; calls count while the store is `armed`.

    "fails once": this call raises OSError. "fails on": later calls do, too. "tears": an upload stores half of
    the file. "tears and says so": it also raises OSError. "lists late": from this call on, a listing is the
    last listing before it.
    """

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.armed, self.calls, self.at, self.fault = False, 0, -1, ""
        self.last_listing: list[str] | None = None

    def count_call(self) -> bool:
        if not self.armed:
            return False
        self.calls += 1
        fails_once = self.fault == "fails once" and self.calls == self.at
        fails_on = self.fault == "fails on" and self.calls >= self.at
        if fails_once or fails_on:
            raise OSError(f"503 on call {self.calls}")
        return self.calls == self.at

    def put_file(self, lpath: str, rpath: str, **options: Any) -> None:
        is_the_one, content = self.count_call(), Path(lpath).read_bytes()
        is_torn = is_the_one and self.fault.startswith("tears")
        self.pipe_file(rpath, content[: len(content) // 2] if is_torn else content)
        if is_torn and self.fault == "tears and says so":
            raise OSError("connection lost")

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

    def info(self, path: str, **options: Any) -> Any:
        self.count_call()
        return super().info(path, **options)

    def rm_file(self, path: str) -> None:
        self.count_call()
        super().rm_file(path)
