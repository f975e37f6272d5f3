"""Record what a process does to files, and stop it at any of these calls."""

import builtins
import io
import os
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RENAMES = ("replace", "rename", "link", "symlink")
REMOVALS = ("unlink", "remove", "truncate")


@dataclass(frozen=True)
class Call:
    """open, write, fsync, replace and so on. The inode is that of the file, or of the one that is renamed."""

    name: str
    path: str
    inode: int
    target: str = ""
    bytes: int = 0

    def __str__(self) -> str:
        more = (
            f", {Path(self.target).name}" if self.target else f", {self.bytes:,} bytes" if self.bytes else ""
        )
        return f"{self.name}({Path(self.path).name or self.path}{more})"


class Recorder:
    """From now on, each call that changes a file is in `calls`, whichever way Python code makes it.

    At call `stop_at`, counted from 0, the process kills itself, a write being half done. With `pause`, a
    folder, it waits instead: it makes the folder `pause`/paused, and goes on when there is `pause`/go.
    """

    def __init__(self, stop_at: int, pause: Path | None) -> None:
        self.calls, self.stop_at, self.pause = list[Call](), stop_at, pause
        self.paths: dict[int, str] = {}  # by inode
        for switch in ("_USE_CP_SENDFILE", "_USE_CP_COPY_FILE_RANGE"):
            setattr(shutil, switch, False)  # else the kernel makes copies, which are not seen here
        self.os_write, self.os_open = os.write, os.open
        io.open = builtins.open = self.make_open(io.open)  # type: ignore[assignment]
        os.open, os.write = self.record_os_open, self.record_os_write  # type: ignore[assignment]
        for name in ("fsync", "fdatasync"):
            setattr(os, name, self.make_fsync(getattr(os, name)))
        for name in (*RENAMES, *REMOVALS):
            setattr(os, name, self.make_path_call(name, getattr(os, name)))

    def hit(self, call: Call, half: Callable[[], Any] | None = None) -> None:
        self.calls.append(call)
        if len(self.calls) - 1 != self.stop_at:
            return
        if not self.pause:
            if half:
                half()
            os.kill(os.getpid(), signal.SIGKILL)
        elif not (self.pause / "paused").exists():
            os.mkdir(self.pause / "paused")
            while not (self.pause / "go").exists():
                time.sleep(0.002)

    def of_fd(self, name: str, fd: int, size: int = 0) -> Call:
        inode = os.fstat(fd).st_ino
        return Call(name, self.paths.get(inode, "folder or file"), inode, bytes=size)

    def opened(self, fd: int, path: Any) -> None:
        if not isinstance(path, int):
            self.paths[os.fstat(fd).st_ino] = os.path.abspath(path)

    def make_open(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self

        class File(io.FileIO):
            def write(self, data: Any) -> int:
                content = memoryview(data).cast("B")
                half = content[: len(content) // 2]
                recorder.hit(
                    recorder.of_fd("write", self.fileno(), len(content)),
                    lambda: super(File, self).write(half),
                )
                return super().write(content)

        def open_file(
            file: Any, mode: str = "r", buffering: int = -1, encoding: Any = None, errors: Any = None,
            newline: Any = None, closefd: bool = True, opener: Any = None,
        ) -> Any:  # fmt: skip
            if not set(mode) & set("wax+"):
                return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
            if not isinstance(file, int):
                recorder.hit(Call("open", os.path.abspath(file), 0))
            raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
            recorder.opened(raw.fileno(), file)
            if buffering == 0:
                return raw
            buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding, errors, newline)

        return open_file

    def record_os_open(self, path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            self.hit(Call("open", os.path.abspath(path), 0))
        fd = self.os_open(path, flags, *arguments, **options)
        self.opened(fd, path)
        return fd

    def record_os_write(self, fd: int, data: Any) -> int:
        self.hit(self.of_fd("write", fd, len(data)), lambda: self.os_write(fd, data[: len(data) // 2]))
        return self.os_write(fd, data)

    def make_fsync(self, original: Callable[[int], None]) -> Callable[[Any], None]:
        def fsync(file: Any) -> None:
            fd = file if isinstance(file, int) else file.fileno()
            self.hit(self.of_fd("fsync", fd))
            original(fd)

        return fsync

    def make_path_call(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *arguments: Any, **options: Any) -> Any:
            inode = os.stat(path).st_ino if os.path.exists(path) else 0
            target = os.path.abspath(arguments[0]) if name in RENAMES else ""
            self.hit(Call(name, os.path.abspath(path), inode, target))
            return original(path, *arguments, **options)

        return call
