"""Every point at which a save can be cut short: is there a valid snapshot, at most one interval old?

    python benchmarks/crash_points.py                # needs Linux and strace; four minutes
    python benchmarks/crash_points.py --stride 11    # every eleventh point only: half a minute
    python benchmarks/crash_points.py --tier memory  # only saves to a node's memory; loop: by Checkpoint

There is a snapshot of step 20, and step 30 is saved: to disk, to a node's memory, or by Checkpoint in a loop.
These faults are tried at every point (`power` and `store` only on disk, `order` not in a loop):

- `kill`: SIGKILL on entering each system call of the save (strace's fault injection), except `futex`;
- `ENOSPC`, `EIO`: each of the save's calls on files fails with this error, and the process lives;
- `order`: the workers are killed while each tensor file is absent, half written or whole, in any combination;
- `power`: power fails after each file operation, and parts of what was not fsynced are lost;
- `store`: at each call, an object store has one of the faults that FaultyStore explains.

After each fault the newest valid snapshot must be of step 20 or 30. Then a further save must succeed, and
leave no file of an unfinished save. Prints a row per point, as JSON. Exit code 1 if a point fails.
"""

import collections
import contextlib
import functools
import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from common import Tally, argument_parser, row, work_folder
from faulty_store import FAULTS, FaultyStore
from support.snapshots import make_manifest

from mingpt.snapshot import Checkpoint, Manifest, MemoryFolder, Saver, Snapshot, Store, Tier
from mingpt.snapshot.layout import make_layout, specs_of
from mingpt.snapshot.reading import accept_all
from mingpt.snapshot.search import Reader, choose

ON_FILES = {
    "open", "openat", "write", "pwrite64", "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink",
    "unlinkat", "close", "stat", "newfstatat", "fstat", "statx", "lstat", "lseek", "ioctl", "getdents64",
    "read", "mkdir", "rmdir", "ftruncate", "access", "faccessat2",
}  # fmt: skip
TIERS = ("disk", "memory", "loop")
BEGIN, END = "/the/save/begins", "/the/save/ends"  # paths that the child looks up for strace to see

Verdicts = Iterator[tuple[str, str, str]]  # kind of fault, where it happened, verdict
Operation = tuple[str, str, str]  # kind, name of a file, its new name or its inode
DiskState = tuple[tuple[str, bytes], ...]  # names and contents of a folder's files


class Place:
    def __init__(self, kind: str, path: Path, disk: Store | None = None) -> None:
        path.mkdir(exist_ok=True)
        self.kind, self.path, self.disk = kind, path, disk or Store(str(path / "snapshots"))
        self.memory = MemoryFolder(str(path), "0" * 32, path)

    def stores(self) -> list[Store]:
        return [self.disk, *self.memory.stores()]

    def tier(self, generation: int, keep: int = 1) -> Tier:
        """Return the tier to which this generation of the run saves, made as saving.py makes it."""
        if self.kind == "disk":
            return Tier("disk", self.disk, keep=keep, keep_best=True)
        replaces, store = self.memory.stores(), Store(str(self.memory.root / f"{generation:032x}"))
        self.memory.create(store, 1)
        return Tier("memory", store, keep=keep, may_skip=True, is_durable=False, replaces=replaces)

    def save_first(self) -> None:
        if self.kind == "disk":
            self.disk.prepare()
        tier = self.tier(1, keep=2)
        for step in (10, 20) if self.kind == "disk" else (20,):
            write(tier, step)
        if tier.error:
            raise tier.error

    def clean(self, step: int, faults: Mapping[int, str]) -> None:
        """Do what a start does that has found `step`; `faults` says why newer snapshots are corrupt."""
        if self.kind == "memory":
            self.memory.clear(step)
            return
        for bad, reason in faults.items():
            self.disk.quarantine(bad, reason)
        self.disk.prepare()


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    names = [f"{group}.{part}" for group in ("model", "optimizer") for part in ("first", "second")]
    return {name: torch.full((150,), float(step)) for name in names}


def manifest(step: int) -> Manifest:
    return make_manifest(step, tokenizer={"kind": "bytes", "vocab_size": 3})


def staged(tier: Tier, step: int) -> Saver:
    saver, tensors = Saver([tier], tokenizer=b"abc"), tensors_of(step)
    saver.allocate(tensors)
    assert saver.staging
    saver.staging.fill(tensors)
    return saver


def write(tier: Tier, step: int) -> None:
    staged(tier, step).write(manifest(step), [tier], lambda: None)


def find_newest(stores: Sequence[Store]) -> tuple[Snapshot | None, dict[int, str]]:
    reader = Reader(stores, accept_all, rank=0)
    choice = choose(reader.offers(), None)
    while choice and not reader.verify(choice):
        choice = choose(reader.offers(), None)
    faults = {step: str(fault) for (_, step), fault in reader.faulty.items()}
    return reader.opened[choice.store, choice.step] if choice else None, faults


def verdict(place: Place) -> str:
    found, faults = find_newest(place.stores())
    if found is None:
        return "there is no valid snapshot"
    step = found.manifest.step
    if step not in (20, 30):
        return f"the newest is of step {step}"
    expected = tensors_of(step)
    if any(not torch.equal(found.read(name), expected[name]) for name in expected):
        return "other content"
    place.clean(step, faults)
    write(place.tier(3), 40)
    found, faults = find_newest(place.stores())
    if found is None or found.manifest.step != 40 or faults:
        return "a further save fails"
    if len(place.memory.stores()) != (place.kind == "memory"):
        return "the folder of another generation is left"
    for store in place.stores():
        if store.steps() != store.steps("safetensors"):
            return "files without a manifest are left"
        if any(name.startswith("partial-") for name in store.names()):
            return "a partial file is left"
    return "ok"


def save_under_strace(place: Place, injection: list[str], log: Path) -> None:
    tier = place.tier(2)
    saver = staged(tier, 30)
    with open(place.path / "metrics.jsonl", "a") as records:

        def save() -> None:
            saver.write(manifest(30), [tier], lambda: os.fsync(records.fileno()))

        status = run_under_strace(lambda: save, injection, log)
    is_hit = os.WIFSIGNALED(status) or "(INJECTED)" in log.read_text()
    assert is_hit or not injection, f"{injection} hit nothing"


def run_under_strace(prepare: Callable[[], Callable[[], None]], injection: list[str], log: Path) -> int:
    child = os.fork()
    if child == 0:
        work = prepare()
        os.kill(os.getpid(), signal.SIGSTOP)
        os.access(BEGIN, os.F_OK)
        with contextlib.suppress(Exception):  # a loop is told of what was injected
            work()
        os.access(END, os.F_OK)
        os._exit(0)
    os.waitpid(child, os.WUNTRACED)
    strace = attach_strace(child, injection, log)
    os.kill(child, signal.SIGCONT)
    _, status = os.waitpid(child, 0)
    strace.communicate()
    return status


def attach_strace(pid: int, injection: list[str], log: Path) -> subprocess.Popen[str]:
    command = ["strace", "-f", "-q", "-y", "-o", str(log), *injection, "-p", str(pid)]
    strace = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while "TracerPid:\t0\n" in Path(f"/proc/{pid}/status").read_text():
        if strace.poll() is not None:
            os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"strace cannot attach: {strace.communicate()[1]}")
        time.sleep(0.001)
    return strace


def system_calls(log: Path) -> list[tuple[str, int, str]]:
    """Return (name, number among the thread's calls of this name, call) of a save's calls, except `futex`."""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    found, is_inside = [], False
    for line in log.read_text(errors="replace").splitlines():
        match = re.match(r"(\d+) +((\w+)\(.*)", line)
        if not match:
            continue
        thread, call, name = match.groups()
        counts[thread, name] += 1
        if END in line:
            is_inside = False
        if is_inside and name != "futex":
            found.append((name, counts[thread, name], call))
        if BEGIN in line:
            is_inside = True
    return found


def faults_by_strace(work: Path, kind: str, stride: int) -> Verdicts:
    """Leaves an undisturbed save in `work` for `power_losses`."""
    reference, log = Place(kind, work / f"{kind}-reference"), work / f"{kind}-reference.log"
    reference.save_first()
    save_under_strace(reference, [], log)
    for index, (fault, point, injection) in enumerate(points_of(log)[::stride]):
        place = Place(kind, work / f"{kind}-{fault}-{index}")
        place.save_first()
        save_under_strace(place, injection, work / "fault.log")
        yield fault, point, verdict(place)


def points_of(log: Path) -> list[tuple[str, str, list[str]]]:
    calls = list(dict.fromkeys((name, number) for name, number, _ in system_calls(log)))
    points = [("kill", "signal=KILL", call) for call in calls]
    for error in ("ENOSPC", "EIO"):
        points += [(error, f"error={error}", call) for call in calls if call[0] in ON_FILES]
    return [
        (fault, f"{name} {number}", ["-e", f"inject={name}:{what}:when={number}"])
        for fault, what, (name, number) in points
    ]


def faults_of_a_loop(work: Path, stride: int) -> Verdicts:
    """A point that is not met, as threads vary, is a whole save."""
    log = work / "loop-reference.log"
    loop_under_strace(work / "loop-reference", [], log)
    for index, (fault, point, injection) in enumerate(points_of(log)[::stride]):
        folder = work / f"loop-{fault}-{index}"
        loop_under_strace(folder, injection, work / "fault.log")
        with multiprocessing.get_context("fork").Pool(1) as pool:  # the threads of a Checkpoint end there
            yield fault, point, pool.apply(verdict_of_loop, [folder])


def save_by_checkpoint(checkpoint: Checkpoint, *steps: int) -> None:
    for step in steps:
        checkpoint.save(step, {"weights": tensors_of(step)})
    checkpoint.wait()


def loop_under_strace(folder: Path, injection: list[str], log: Path) -> None:
    if os.fork() == 0:
        save_by_checkpoint(Checkpoint(folder), 10, 20)
        os._exit(0)
    os.wait()

    def prepare() -> Callable[[], None]:
        checkpoint = Checkpoint(folder, keep=1)
        checkpoint.load({"weights": tensors_of(0)})
        return functools.partial(save_by_checkpoint, checkpoint, 30)

    run_under_strace(prepare, injection, log)


def verdict_of_loop(folder: Path) -> str:
    checkpoint, state = Checkpoint(folder, keep=1), {"weights": tensors_of(0)}
    step = checkpoint.load(state) or 0
    if step not in (20, 30) or any(bool((one != step).any()) for one in state["weights"].values()):
        return f"step {step} was loaded, or other content"
    save_by_checkpoint(checkpoint, 40)
    store = Store(str(folder))
    is_clean = store.steps("safetensors") == [40] and not list(folder.glob("partial-*"))
    return "ok" if store.steps() == [40] and is_clean else "files of another save are left"


def file_operations(log: Path, root: str) -> list[Operation]:
    done: list[Operation] = []
    for name, _, line in system_calls(log):
        names = re.findall(rf'"{root}/([^"]+)"', line)
        opened = re.search(rf"^\w+\(\d+<{root}/?([^>]*)>", line)
        if name == "openat" and "O_CREAT" in line and names:
            done.append(("create", names[0], f"new {names[0]}"))
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
    contents = dict(before)  # {inode: content once all of it is written}
    current = {name: name for name in before}  # {name: inode} as processes see the folder
    durable = current  # {name: inode} as the folder's last fsync left it
    pending: list[Operation] = []  # operations on the folder since then
    unsynced: set[str] = set()  # inodes
    for operation in done:
        kind, name, new = operation
        if kind == "sync" and name:
            unsynced.discard(current[name])
        elif kind == "sync":
            durable, pending = current, []
        else:
            current = apply(current, [operation])
            pending.append(operation)
        if kind == "create":
            contents[new] = saved.get(name.removeprefix("partial-"), b"")
            unsynced.add(new)
    for choice in itertools.product([True, False], repeat=len(pending)):
        folder = apply(durable, [operation for operation, did in zip(pending, choice, strict=True) if did])
        for fraction in (0.0, 0.5, 1.0):
            disk = {}
            for name, inode in folder.items():
                size = len(contents[inode])
                disk[name] = contents[inode][: int(size * fraction) if inode in unsynced else size]
            yield tuple(sorted(disk.items()))


def apply(folder: Mapping[str, str], operations: Sequence[Operation]) -> dict[str, str]:
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
    reference = work / "disk-reference" / "snapshots"
    done, saved = file_operations(work / "disk-reference.log", str(reference)), read_files(reference)
    first_two = Place("disk", work / "before")
    first_two.save_first()
    before = read_files(Path(first_two.disk.root))
    states: set[DiskState] = set()
    for cut in range(len(done) + 1):
        states.update(states_after(done[:cut], before, saved))
    for number, state in enumerate(sorted(states)[::stride]):
        place = Place("disk", work / f"power-{number}")
        place.disk.prepare()
        for name, held in state:
            Path(place.disk.path(name)).write_bytes(held)
        yield "power", f"state {number}", verdict(place)


def orders(work: Path, kind: str, stride: int) -> Verdicts:
    states = list(itertools.product(("absent", "half", "whole"), repeat=2))
    for number, state in list(enumerate(states))[::stride]:
        place = Place(kind, work / f"{kind}-order-{number}")
        place.save_first()
        tier = place.tier(2)
        store, saver = tier.store, staged(tier, 30)
        store.begin(30)
        for layout, condition in zip(make_layout(specs_of(tensors_of(30)), 30), state, strict=True):
            content = b"".join(saver.chunks(layout))
            if condition == "half":
                Path(store.path(f"partial-{layout.name}")).write_bytes(content[: len(content) // 2])
            elif condition == "whole":
                Path(store.path(layout.name)).write_bytes(content)
        yield "order", f"state {number}", verdict(place)


def faulty_store(work: Path) -> tuple[Place, FaultyStore]:
    FaultyStore.store.clear()
    FaultyStore.pseudo_dirs[:] = [""]
    place = Place("disk", work / "store", Store("memory://bucket/run", (0.0, 0.0)))
    files = FaultyStore(skip_instance_cache=True)
    place.disk.files = files
    place.save_first()
    return place, files


def faults_of_a_store(work: Path, stride: int) -> Verdicts:
    place, files = faulty_store(work)
    files.armed = True
    write(place.tier(2), 30)
    points = [(fault, at) for fault in FAULTS for at in range(1, files.calls + 1)]
    for fault, at in points[::stride]:
        yield f"store {fault}", f"call {at}", fault_of_a_store(work, fault, at)


def fault_of_a_store(work: Path, fault: str, at: int) -> str:
    place, files = faulty_store(work)
    files.last_listing = files.ls(place.disk.root, detail=False)
    files.armed, files.fault, files.at = True, fault, at
    write(place.tier(2), 30)
    if fault != "lists late":
        files.armed = False
    found, _ = find_newest(place.stores())  # a listing may still be late
    files.armed = False
    if found and found.manifest.step in (20, 30):
        return verdict(place)
    return "nothing found by a late listing"


def verdicts(work: Path, kind: str, stride: int) -> Verdicts:
    if kind == "loop":
        yield from faults_of_a_loop(work, stride)
        return
    yield from faults_by_strace(work, kind, stride)
    yield from orders(work, kind, stride)
    if kind == "disk":
        yield from power_losses(work, stride)
        yield from faults_of_a_store(work, stride)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--stride", type=int, default=1)
    parser.add_argument("--tier", choices=TIERS, help="by default all")
    arguments = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    tally = Tally()
    with work_folder() as work:
        for kind in [arguments.tier] if arguments.tier else TIERS:
            for fault, point, what in verdicts(work, kind, arguments.stride):
                counts[f"{kind} {fault}"] += 1
                tally.add(what == "ok")
                row(tier=kind, fault=fault, point=point, verdict=what)
    return tally.exit_code(points=dict(counts))


if __name__ == "__main__":
    sys.exit(main())
