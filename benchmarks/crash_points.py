"""Every point at which a save can be cut short: is a valid snapshot, at most one interval old, there afterwards?

    python benchmarks/crash_points.py               # needs strace; a minute
    python benchmarks/crash_points.py --stride 9    # every ninth point only

Snapshots of steps 10 and 20 are there, the one of step 30 is being saved and the others are then retired. Four worlds, all enumerated:

- `kill`: SIGKILL on entering each system call of the save (strace's fault injection);
- `ENOSPC`, `EIO`: each of its calls on files fails so, and the process lives;
- `power`: the machine loses power after each of its operations on files. What was not fsynced is on disk, half of it is, or none; each
  renaming and removal since the folder's last fsync has happened or not, in any combination (after Pillai et al. 2014, "All file systems
  are not created equal");
- `store`: an object store fails once, fails from then on, tears an upload with or without saying so, or lists late, at each of its calls.

After each the newest snapshot that holds must be of step 20 or 30, with the right content, and a further save must succeed. Exit code 1
otherwise.
"""

import argparse
import collections
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from common import row
from fsspec.implementations.memory import MemoryFileSystem

sys.path.insert(0, str(Path(__file__).parent.parent))
from mingpt import snapshot
from mingpt.snapshot import Folder, Writer
from mingpt.stage import pack

ON_FILES = {
    "open", "openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "close", "stat",
    "newfstatat", "fstat", "statx", "lstat", "lseek", "ioctl", "getdents64", "read", "mkdir", "ftruncate", "access", "faccessat2",
}  # fmt: skip
BEGIN, END = "/the/save/begins", "/the/save/ends"


def content(step: int) -> memoryview:
    return pack({"model.weight": torch.full((300,), float(step)), "optimizer.weight.step": torch.tensor(float(step))})


def manifest(step: int) -> dict[str, Any]:
    return {"step": step, "windows": step, "config": {}, "vocabulary": "", "metrics": {}}


def writer(folder: Folder) -> Writer:
    return Writer(folder, keep_last=1, keep_best=True)


def furnish(folder: Folder) -> None:
    folder.prepare()
    for step in (10, 20):
        folder.write(manifest(step), content(step))


def verdict(folder: Folder, allowed: tuple[int, ...] = (20, 30)) -> str:
    """ "ok", or what is wrong with what the fault left behind."""
    found, wrong = folder.newest()
    if found is None or found.manifest["step"] not in allowed:
        return f"newest is {found and found.manifest['step']}"
    if found.content != bytes(content(found.manifest["step"])):
        return "other content"
    for step, reason in wrong.items():
        folder.set_aside(step, reason)
    folder.prepare()
    folder.write(manifest(40), content(40))
    found, wrong = folder.newest()
    if found is None or found.manifest["step"] != 40 or wrong:
        return "a further save fails"
    return "a partial file is left" if any(name.startswith("partial-") for name in folder.names()) else "ok"


def save_under_strace(folder: Folder, injection: list[str], log: Path) -> None:
    """Save step 30 in a child that strace watches from its first breath on; returns when the child is gone."""
    records = open(Path(folder.root).parent / "metrics.jsonl", "a")  # noqa: SIM115 - the child's
    job, bytes_30 = writer(folder), content(30)

    def sync() -> dict[str, Any]:
        os.fsync(records.fileno())
        return {}

    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.access(BEGIN, os.F_OK)
        job.write(manifest(30), bytes_30, sync)
        os.access(END, os.F_OK)
        os._exit(0)
    records.close()
    os.waitpid(child, os.WUNTRACED)
    watcher = subprocess.Popen(["strace", "-q", "-y", "-o", str(log), *injection, "-p", str(child)], stderr=subprocess.PIPE, text=True)
    while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
        if watcher.poll() is not None:
            os.kill(child, signal.SIGKILL)
            raise RuntimeError(f"strace cannot attach: {watcher.communicate()[1]}")
        time.sleep(0.001)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    watcher.wait()
    assert not injection or os.WIFSIGNALED(status) or "(INJECTED)" in log.read_text(), f"{injection} hit nothing"
    assert watcher.stderr
    watcher.stderr.close()


def calls(log: Path) -> list[tuple[str, int, str, bool]]:
    """The child's system calls: name, how many of that name there were up to it, the line, and whether it belongs to the save."""
    counts: collections.Counter[str] = collections.Counter()
    found, inside = [], False
    for line in log.read_text(errors="replace").splitlines():
        if match := re.match(r"(\w+)\(", line):
            counts[match[1]] += 1
            if END in line:
                inside = False
            found.append((match[1], counts[match[1]], line, inside))
            if BEGIN in line:
                inside = True
    return found


def faults_by_strace(work: Path, stride: int) -> Iterator[tuple[str, str, str]]:
    """(world, point, verdict) of each."""
    reference = Folder(str(work / "reference" / "snapshots"))
    furnish(reference)
    save_under_strace(reference, [], work / "reference.log")
    save = [(name, number) for name, number, _, inside in calls(work / "reference.log") if inside]
    points = [("kill", "signal=KILL", name, number) for name, number in save]
    points += [(error, f"error={error}", name, number) for error in ("ENOSPC", "EIO") for name, number in save if name in ON_FILES]
    for place, (world, what, name, number) in enumerate(points[::stride]):
        folder = Folder(str(work / f"{world}-{place}" / "snapshots"))
        furnish(folder)
        save_under_strace(folder, ["-e", f"inject={name}:{what}:when={number}"], work / "fault.log")
        yield world, f"{name} {number}", verdict(folder)


def operations(log: Path, root: str) -> list[tuple[str, str, str]]:
    """What the save did to the snapshot folder: (kind, file, new name)."""
    done: list[tuple[str, str, str]] = []
    for name, _, line, inside in calls(log):
        names = re.findall(rf'"{root}/([^"]+)"', line)
        opened = re.search(rf"^\w+\(\d+<{root}/?([^>]*)>", line)
        if not inside:
            continue
        if name == "openat" and "O_CREAT" in line and names:
            done.append(("create", names[0], ""))
        elif name == "write" and opened:
            done.append(("write", opened[1], ""))
        elif name == "fsync" and opened:
            done.append(("sync", opened[1], ""))  # with no name: the folder
        elif name.startswith("rename") and names:
            done.append(("rename", names[0], names[1]))
        elif name.startswith("unlink") and names:
            done.append(("unlink", names[0], ""))
    return done


def power_losses(work: Path, stride: int) -> Iterator[tuple[str, str, str]]:
    reference = work / "reference" / "snapshots"
    done = operations(work / "reference.log", str(reference))
    before = Folder(str(work / "before" / "snapshots"))
    furnish(before)
    whole = {path.name: path.read_bytes() for path in reference.iterdir()}
    entries = {path.name: path.read_bytes() for path in Path(before.root).iterdir()}
    seen: set[tuple[tuple[str, bytes], ...]] = set()
    for cut in range(len(done) + 1):
        data, names, pending, unsynced = {name: name for name in entries}, dict(entries), list[tuple[str, str, str]](), set[str]()
        durable = dict(data)  # name -> inode, as the folder's last fsync left it
        for kind, name, new in done[:cut]:
            if kind == "create":
                inode = f"new {name}"
                data[name] = inode
                names[inode] = whole[name.removeprefix("partial-")]
                unsynced.add(inode)
                pending.append((kind, name, inode))
            elif kind == "sync" and name:
                unsynced.discard(data[name])
            elif kind == "sync":
                durable, pending = dict(data), []
            elif kind == "rename":
                data[new] = data.pop(name)
                pending.append((kind, name, new))
            elif kind == "unlink":
                data.pop(name, None)
                pending.append((kind, name, ""))
        for happened in itertools.product([True, False], repeat=len(pending)):
            folder = dict(durable)
            for (kind, name, new), did in zip(pending, happened, strict=True):
                if did and kind == "create":
                    folder[name] = new
                elif did and kind == "rename" and name in folder:
                    folder[new] = folder.pop(name)
                elif did and kind == "unlink":
                    folder.pop(name, None)
            for share in (0.0, 0.5, 1.0):
                disk = {name: names[inode][: int(len(names[inode]) * share)] if inode in unsynced else names[inode] for name, inode in folder.items()}
                seen.add(tuple(sorted(disk.items())))
    for number, disk_state in enumerate(sorted(seen)[::stride]):
        after = Folder(str(work / f"power-{number}" / "snapshots"))
        after.prepare()
        for name, held in disk_state:
            Path(after.path(name)).write_bytes(held)
        yield "power", f"state {number}", verdict(after)


class FaultyStore(MemoryFileSystem):  # type: ignore[misc]
    """An object store in memory whose `at`-th call goes wrong as `fault` says; counts its calls while `armed`."""

    protocol = "faulty"
    store: dict[str, Any] = {}  # noqa: RUF012 - as the base class has it
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.armed, self.calls, self.at, self.fault = False, 0, -1, ""
        self.stale: list[str] | None = None

    def strike(self) -> bool:
        """Whether this call is the one; raises if it is to fail."""
        if not self.armed:
            return False
        self.calls += 1
        if (self.fault == "fails once" and self.calls == self.at) or (self.fault == "fails on" and self.calls >= self.at):
            raise OSError(f"503 on call {self.calls}")
        return self.calls == self.at

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        hit = self.strike()
        if hit and self.fault.startswith("tears"):
            super().pipe_file(path, value[: len(value) // 2], mode=mode, **options)
            if self.fault == "tears and says so":
                raise OSError("connection lost")
            return
        super().pipe_file(path, value, mode=mode, **options)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        self.strike()
        return bytes(super().cat_file(path, start, end, **options))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        hit, fresh = self.strike(), super().ls(path, detail=False, **options)
        listed = self.stale if self.fault == "lists late" and self.stale is not None and (hit or self.calls >= self.at) else fresh
        if not self.armed or self.calls < self.at:
            self.stale = fresh
        return [{"name": name, "type": "file", "size": 0} for name in listed] if detail else listed

    def size(self, path: str) -> int:
        self.strike()
        return int(super().size(path))

    def exists(self, path: str, **options: Any) -> bool:
        self.strike()
        return bool(super().exists(path, **options))

    def rm_file(self, path: str) -> None:
        self.strike()
        super().rm_file(path)


def store_folder() -> tuple[Folder, FaultyStore]:
    FaultyStore.store.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    folder = Folder("memory://bucket/run")
    folder.files = files = FaultyStore(skip_instance_cache=True)
    furnish(folder)
    return folder, files


def faults_of_a_store(stride: int) -> Iterator[tuple[str, str, str]]:
    snapshot.RETRIES_S = (0.0, 0.0)
    folder, files = store_folder()
    files.armed = True
    writer(folder).write(manifest(30), content(30), dict)
    points = [(fault, at) for fault in ("fails once", "fails on", "tears", "tears and says so", "lists late") for at in range(1, files.calls + 1)]
    for fault, at in points[::stride]:
        folder, files = store_folder()
        files.stale = files.ls(folder.root, detail=False)
        files.armed, files.fault, files.at = True, fault, at
        writer(folder).write(manifest(30), content(30), dict)
        if fault != "lists late":
            files.armed = False
        found = folder.newest()[0]  # a listing may still be late
        late = "ok" if found and found.manifest["step"] in (20, 30) else "nothing found by a late listing"
        files.armed = False
        yield f"store {fault}", f"call {at}", verdict(folder) if late == "ok" else late


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1)
    stride = parser.parse_args().stride
    counts: collections.Counter[str] = collections.Counter()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        worlds: list[Callable[[], Iterator[tuple[str, str, str]]]] = [
            lambda: faults_by_strace(Path(name), stride),
            lambda: power_losses(Path(name), stride),
            lambda: faults_of_a_store(stride),
        ]
        for world in worlds:
            for kind, point, what in world():
                counts[kind] += 1
                bad += what != "ok"
                row(world=kind, point=point, verdict=what)
    row(points=dict(counts), all=sum(counts.values()), bad=bad)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
