"""Every point at which a save can be cut short: is there a valid snapshot, at most one interval old?

    python benchmarks/crash_points.py                # needs Linux and strace; two minutes
    python benchmarks/crash_points.py --stride 11    # every eleventh point only: half a minute

Snapshots of steps 10 and 20 exist. A save writes the snapshot of step 30, then removes the others. Each
snapshot has two tensor files, a tokenizer and a manifest. These kinds of faults are tried at every point:

- `kill`: SIGKILL on entering each system call of the save (strace's fault injection), except `futex`;
- `ENOSPC`, `EIO`: each of the save's calls on files fails with this error, and the process lives;
- `power`: the machine loses power after each of the save's file operations. Files that were not fsynced are
  all whole, all half written or all empty. Each creation, renaming and removal since the folder's last fsync
  has happened or not, in any combination (after Pillai et al. 2014);
- `order`: the workers are killed while each tensor file is absent, half written or whole, in any combination;
- `store`: at each call, an object store has one of the faults that FaultyStore explains.

After each fault the newest valid snapshot must be of step 20 or 30, with the right content. Then a further
save must succeed, and leave no file of an unfinished save. Exit code 1 otherwise.
"""

import collections
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from common import Tally, argument_parser, row, work_folder
from faulty_store import FAULTS, FaultyStore

from mingpt.base.rows import RowMap
from mingpt.snapshot import Keep, Manifest, Snapshot, Saver, Store
from mingpt.snapshot.reading import accept_all
from mingpt.snapshot.saver import Transfer
from mingpt.snapshot.search import Reader

ON_FILES = {
    "open", "openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink",
    "unlinkat", "close", "stat", "newfstatat", "fstat", "statx", "lstat", "lseek", "ioctl", "getdents64",
    "read", "mkdir", "ftruncate", "access", "faccessat2",
}  # fmt: skip
BEGIN, END = "/the/save/begins", "/the/save/ends"  # paths that the child looks up for strace to see

Verdicts = Iterator[tuple[str, str, str]]  # kind of fault, where it happened, verdict
Operation = tuple[str, str, str]  # kind, name of a file, its new name or its inode
DiskState = tuple[tuple[str, bytes], ...]  # names and contents of a folder's files
KEEP = Keep(last=1, best=True)


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    names = [f"{group}.{part}" for group in ("model", "optimizer") for part in ("first", "second")]
    return {name: torch.full((150,), float(step)) for name in names}


def transfer(step: int) -> Transfer:
    """Return the Transfer that writes the tensor files of a step."""
    return Saver(Store("memory://")).stage(step, tensors_of(step))


def manifest(step: int) -> Manifest:
    """Return the manifest of a step, without the fields that a save fills in."""
    return Manifest.model_validate({
        "step": step, "windows": step, "config": {}, "tokenizer": {"kind": "bytes", "vocab_size": 3},
        "data": {"path": "data/input.txt", "sha256": "0" * 64},
        "software": {"torch": "2.13.0", "device": "cpu AVX512", "threads": 1, "dtype": "float32"},
    })  # fmt: skip


def saver(store: Store) -> Saver:
    return Saver(store, tokenizer=b"abc")


def find_newest(store: Store) -> tuple[Snapshot | None, dict[int, str]]:
    """Return the newest valid snapshot, if any, and {step: why a newer snapshot is corrupt}."""
    reader = Reader([store], accept_all, lambda manifest: RowMap({}), rank=0)
    while offers := reader.view().offers:
        if reader.verify(offers):
            break
    corrupt = {fault.step: fault.reason for fault in reader.faults.values()}
    return (reader.opened[0, offers[0].step] if offers else None), corrupt


def write_first_two(store: Store) -> None:
    store.prepare()
    for step in (10, 20):
        saver(store).write_once(manifest(step), transfer(step))


def verdict(store: Store) -> str:
    """Read the store after a fault, then save step 40; return "ok", or what is wrong."""
    found, corrupt = find_newest(store)
    if found is None:
        return "there is no valid snapshot"
    step = found.manifest.step
    if step not in (20, 30):
        return f"the newest is of step {step}"
    expected = tensors_of(step)
    if any(not torch.equal(found.read(name), expected[name]) for name in expected):
        return "other content"
    for bad, reason in corrupt.items():
        store.quarantine(bad, reason)
    store.prepare()
    saver(store).write(manifest(40), transfer(40), lambda: None, KEEP)
    found, corrupt = find_newest(store)
    if found is None or found.manifest.step != 40 or corrupt:
        return "a further save fails"
    if store.steps() != store.steps("safetensors"):
        return "files without a manifest are left"
    return "a partial file is left" if any(name.startswith("partial-") for name in store.names()) else "ok"


def save_under_strace(store: Store, injection: list[str], log: Path) -> None:
    """Save step 30 in a child process. strace, with the options `injection`, writes its calls to `log`."""
    job, transfer_30 = saver(store), transfer(30)
    with open(Path(store.root).parent / "metrics.jsonl", "a") as records:

        def sync_records() -> None:
            os.fsync(records.fileno())

        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGSTOP)
            os.access(BEGIN, os.F_OK)
            job.write(manifest(30), transfer_30, sync_records, KEEP)
            os.access(END, os.F_OK)
            os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    strace = attach_strace(child, injection, log)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    strace.communicate()
    is_hit = os.WIFSIGNALED(status) or "(INJECTED)" in log.read_text()
    assert is_hit or not injection, f"{injection} hit nothing"


def attach_strace(pid: int, injection: list[str], log: Path) -> subprocess.Popen[str]:
    """Attach strace to process `pid`. If strace cannot attach, kill the process and raise RuntimeError."""
    command = ["strace", "-q", "-y", "-o", str(log), *injection, "-p", str(pid)]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        if strace.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"strace cannot attach: {strace.communicate()[1]}")
        time.sleep(0.001)
    return strace


def system_calls(log: Path) -> list[tuple[str, int, str]]:
    """Return (name, number among calls of this name, line of `log`) for the save's calls, except `futex`."""
    counts: collections.Counter[str] = collections.Counter()
    found, is_inside = [], False
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(\w+)\(", line)
        if not match:
            continue
        counts[match[1]] += 1
        if END in line:
            is_inside = False
        if is_inside and match[1] != "futex":
            found.append((match[1], counts[match[1]], line))
        if BEGIN in line:
            is_inside = True
    return found


def faults_by_strace(work: Path, stride: int) -> Verdicts:
    """Yield verdicts on `kill`, `ENOSPC`, `EIO`. Leaves an undisturbed save in `work` for `power_losses`."""
    reference = Store(str(work / "reference" / "snapshots"))
    write_first_two(reference)
    save_under_strace(reference, [], work / "reference.log")
    calls = [(name, number) for name, number, _ in system_calls(work / "reference.log")]
    points = [("kill", "signal=KILL", name, number) for name, number in calls]
    for error in ("ENOSPC", "EIO"):
        points += [(error, f"error={error}", name, number) for name, number in calls if name in ON_FILES]
    for place, (fault, what, name, number) in enumerate(points[::stride]):
        store = Store(str(work / f"{fault}-{place}" / "snapshots"))
        write_first_two(store)
        save_under_strace(store, ["-e", f"inject={name}:{what}:when={number}"], work / "fault.log")
        yield fault, f"{name} {number}", verdict(store)


def file_operations(log: Path, root: str) -> list[Operation]:
    """Return the save's operations on files in the folder `root`, from strace's log."""
    done: list[Operation] = []
    for name, _, line in system_calls(log):
        names = re.findall(rf'"{root}/([^"]+)"', line)
        opened = re.search(rf"^\w+\(\d+<{root}/?([^>]*)>", line)
        if name == "openat" and "O_CREAT" in line and names:
            done.append(("create", names[0], ""))
        elif name == "write" and opened:
            done.append(("write", opened[1], ""))
        elif name == "fsync" and opened:
            done.append(("sync", opened[1], ""))  # without a name it is the folder
        elif name.startswith("rename") and names:
            done.append(("rename", names[0], names[1]))
        elif name.startswith("unlink") and names:
            done.append(("unlink", names[0], ""))
    return done


def states_after(
    done: Sequence[Operation], before: Mapping[str, bytes], saved: Mapping[str, bytes]
) -> Iterator[DiskState]:
    """Yield each state of the disk that a power failure after the operations `done` may leave.

    `before` and `saved` are the files, {name: content}, before and after the whole save.
    """
    contents = dict(before)  # {inode: content once all of it is written}
    current = {name: name for name in before}  # {name: inode} as processes see the folder
    durable = dict(current)  # {name: inode} as the folder's last fsync left it
    pending: list[Operation] = []  # operations on the folder since then
    unsynced: set[str] = set()  # inodes
    for kind, name, new in done:
        if kind == "create":
            inode = f"new {name}"
            current[name] = inode
            contents[inode] = saved.get(name.removeprefix("partial-"), b"")
            unsynced.add(inode)
            pending.append((kind, name, inode))
        elif kind == "sync" and name:
            unsynced.discard(current[name])
        elif kind == "sync":
            durable, pending = dict(current), []
        elif kind == "rename":
            current[new] = current.pop(name)
            pending.append((kind, name, new))
        elif kind == "unlink":
            current.pop(name, None)
            pending.append((kind, name, ""))
    for choice in itertools.product([True, False], repeat=len(pending)):
        folder = apply(durable, [operation for operation, did in zip(pending, choice, strict=True) if did])
        for fraction in (0.0, 0.5, 1.0):
            disk = {}
            for name, inode in folder.items():
                size = len(contents[inode])
                disk[name] = contents[inode][: int(size * fraction) if inode in unsynced else size]
            yield tuple(sorted(disk.items()))


def apply(folder: Mapping[str, str], operations: Sequence[Operation]) -> dict[str, str]:
    """Return the folder, {name: inode}, after these operations. Operations on missing files do nothing."""
    after = dict(folder)
    for kind, name, new in operations:
        if kind == "create":
            after[name] = new
        elif kind == "rename" and name in after:
            after[new] = after.pop(name)
        elif kind == "unlink":
            after.pop(name, None)
    return after


def read_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def power_losses(work: Path, stride: int) -> Verdicts:
    """Yield the verdicts on `power`, from the operations that `faults_by_strace` has recorded."""
    reference = work / "reference" / "snapshots"
    done, saved = file_operations(work / "reference.log", str(reference)), read_files(reference)
    first_two = Store(str(work / "before" / "snapshots"))
    write_first_two(first_two)
    before = read_files(Path(first_two.root))
    states: set[DiskState] = set()
    for cut in range(len(done) + 1):
        states.update(states_after(done[:cut], before, saved))
    for number, state in enumerate(sorted(states)[::stride]):
        store = Store(str(work / f"power-{number}" / "snapshots"))
        store.prepare()
        for name, held in state:
            Path(store.path(name)).write_bytes(held)
        yield "power", f"state {number}", verdict(store)


def orders(work: Path, stride: int) -> Verdicts:
    """Yield the verdicts on `order`, one for each combination of the files' states."""
    files = [layout for layout, _ in transfer(30).files]
    states = list(itertools.product(("absent", "half", "whole"), repeat=len(files)))
    for number, state in list(enumerate(states))[::stride]:
        store = Store(str(work / f"order-{number}" / "snapshots"))
        write_first_two(store)
        store.begin(30)
        save_30 = transfer(30)
        for (layout, chunks), condition in zip(save_30.files, state, strict=True):
            content = b"".join(chunks)
            if condition == "half":
                Path(store.path(f"partial-{layout.name}")).write_bytes(content[: len(content) // 2])
            elif condition == "whole":
                Path(store.path(layout.name)).write_bytes(content)
        yield "order", f"state {number}", verdict(store)


def faulty_store() -> tuple[Store, FaultyStore]:
    """Return a store that has the first two snapshots, and the FaultyStore that holds its files."""
    FaultyStore.store.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    store = Store("memory://bucket/run", (0.0, 0.0))
    files = FaultyStore(skip_instance_cache=True)
    store.files = files
    write_first_two(store)
    return store, files


def faults_of_a_store(stride: int) -> Verdicts:
    """Yield the verdicts on `store`."""
    store, files = faulty_store()
    files.armed = True
    saver(store).write(manifest(30), transfer(30), lambda: None, KEEP)
    points = [(fault, at) for fault in FAULTS for at in range(1, files.calls + 1)]
    for fault, at in points[::stride]:
        yield f"store {fault}", f"call {at}", fault_of_a_store(fault, at)


def fault_of_a_store(fault: str, at: int) -> str:
    """Return the verdict on a save to a store with this fault at call `at`."""
    store, files = faulty_store()
    files.last_listing = files.ls(store.root, detail=False)
    files.armed, files.fault, files.at = True, fault, at
    saver(store).write(manifest(30), transfer(30), lambda: None, KEEP)
    if fault != "lists late":
        files.armed = False
    found, _ = find_newest(store)  # a listing may still be late
    files.armed = False
    if found and found.manifest.step in (20, 30):
        return verdict(store)
    return "nothing found by a late listing"


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--stride", type=int, default=1)
    stride = parser.parse_args().stride
    counts: collections.Counter[str] = collections.Counter()
    tally = Tally()
    with work_folder() as work:
        verdicts = itertools.chain(
            faults_by_strace(work, stride),
            power_losses(work, stride),
            orders(work, stride),
            faults_of_a_store(stride),
        )
        for fault, point, what in verdicts:
            counts[fault] += 1
            tally.add(what == "ok")
            row(fault=fault, point=point, verdict=what)
    return tally.exit_code(points=dict(counts))


if __name__ == "__main__":
    sys.exit(main())
