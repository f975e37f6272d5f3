"""Check exercise 4: a snapshot that is valid whenever the process is killed, or the power fails."""

import tempfile
from pathlib import Path

from tutorial.checks.files import RENAMES, Call, Recorder
from tutorial.checks.processes import Place, Process, Refused, wait_for_all

SIZE = 300_000
OLD, NEW, THIRD = (bytes([letter]) * SIZE for letter in b"onx")


def task(place: Place, path: Path, data: bytes, stop_at: int, pause: Path | None) -> list[Call]:
    recorder = Recorder(stop_at, pause)
    place.load("save")(path, data)
    return recorder.calls


class Saver(Process):
    """A process that saves, with a folder of its own for what the check needs."""

    def __init__(self, answer: Path, path: Path, data: bytes, stop_at: int = -1, pause: bool = False) -> None:
        control = Path(tempfile.mkdtemp(dir=path.parent.parent))
        super().__init__(Place(answer, control, 0, 1), task, path, data, stop_at, control if pause else None)


def save(answer: Path, path: Path, data: bytes) -> list[Call]:
    """Save without a kill. Raises Refused if the file is not what was saved."""
    saver = Saver(answer, path, data)
    try:
        calls: list[Call] = wait_for_all([saver])[0]
    finally:
        saver.kill()
    if not path.exists() or path.read_bytes() != data:
        raise Refused(f"save returned, and {path.name} is not what was to be saved: {describe_file(path)}.")
    return calls


def describe_file(path: Path) -> str:
    if not path.exists():
        return "there is no such file"
    size = path.stat().st_size
    return f"it has {size:,} of {SIZE:,} bytes" if size != SIZE else "it has other bytes"


def kill_at(answer: Path, path: Path, number: int, call: Call) -> None:
    """Raises Refused unless a kill there leaves the old or the new snapshot, and the next save works."""
    path.write_bytes(OLD)
    saver = Saver(answer, path, NEW, number)
    try:
        saver.wait()
    finally:
        saver.kill()
    text = f"Killed at call {number + 1}, {call}:"
    if not path.exists():
        raise Refused(
            f"{text} there is no snapshot. os.replace removes the old one when the new one is whole."
        )
    if path.read_bytes() not in (OLD, NEW):
        raise Refused(
            f"{text} {path.name} is no snapshot, {describe_file(path)}. The new one is written over the only "
            "one. See tutorial/mistakes/only_snapshot.py."
        )
    try:
        save(answer, path, THIRD)
    except Refused as refusal:
        raise Refused(f"{text} the next save fails, beside what was left. {refusal}") from None


def save_two(answer: Path, first: Path, number: int, call: Call) -> None:
    """Raises Refused unless two processes can save different snapshots of one folder at the same time."""
    second = first.with_name("snapshot.1")
    slow = Saver(answer, first, OLD, number, pause=True)
    try:
        slow.wait(slow.place.folder / "paused")
        save(answer, second, NEW)
        (slow.place.folder / "go").mkdir()
        wait_for_all([slow])
        for path, data in ((first, OLD), (second, NEW)):
            if not path.exists() or path.read_bytes() != data:
                raise Refused(f"Then {path.name} is not what was saved: {describe_file(path)}.")
    except Refused as refusal:
        text = f"One process saved {first.name}; before its call {number + 1}, {call}, a second one saved "
        text += f"{second.name} in the same folder. Do they use the same temporary file? {refusal}"
        raise Refused(text) from None
    finally:
        slow.kill()


def make_path(root: Path, name: str = "snapshot") -> Path:
    folder = Path(tempfile.mkdtemp(dir=root)) / "snapshots"
    folder.mkdir()
    return folder / name


def is_among_writes(calls: list[Call], number: int) -> bool:
    """Whether a call is one of many writes, and neither the first nor the last of them."""
    around = [call.name for call in calls[max(number - 1, 0) : number + 2]]
    return around == ["write"] * 3


def check_power_cut(path: Path, calls: list[Call], order: str) -> None:
    """Raises Refused unless the order of calls is safe: a kill keeps what the kernel has, a power cut not."""
    renames = [n for n, call in enumerate(calls) if call.name in RENAMES and call.target == str(path)]
    if not renames:
        raise Refused(f"No rename to the snapshot's name was seen: use os.replace.{order}")
    last = renames[-1]
    source = Path(calls[last].path)
    if source.parent != path.parent:
        raise Refused(f"{source} is in another folder: os.replace works within one file system only.")
    found: dict[tuple[str, int], list[int]] = {}
    for n, call in enumerate(calls):
        found.setdefault((call.name, call.inode), []).append(n)
    writes, syncs = (found.get((name, calls[last].inode), []) for name in ("write", "fsync"))
    if not writes:
        raise Refused(f"No write to {source.name} was seen: write by open() or os.open().{order}")
    if not any(writes[-1] < sync < last for sync in syncs):
        late = sum(calls[n].bytes for n in writes if syncs and n > syncs[0])
        problem = f"{source.name} is renamed before an fsync: after a power cut it may be an empty file."
        if late:
            problem = f"{late:,} bytes, which Python had in its buffer, are written after the fsync: flush()."
        raise Refused(problem + order)
    if found.get(("fsync", path.parent.stat().st_ino), [-1])[-1] < last:
        problem = "The folder is not fsynced after the rename: a power cut may bring back the old snapshot."
        raise Refused(problem + order)


def check(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        path = make_path(root)
        save(answer, path, OLD)
        calls = save(answer, path, NEW)
        left = sorted(other.name for other in path.parent.iterdir() if other != path)
        if left:
            raise Refused(f"save returned, and left other files behind: {', '.join(left)}.")
        numbers = [number for number in range(len(calls)) if not is_among_writes(calls, number)]
        for number in numbers:
            kill_at(answer, make_path(root), number, calls[number])
        for number in numbers:
            save_two(answer, make_path(root, "snapshot.0"), number, calls[number])
        order = f" The calls were {', '.join(str(calls[number]) for number in numbers)}."
        check_power_cut(path, calls, order)
        small = save(answer, path, NEW[:100])  # such a piece stays in Python's buffer until it is flushed
        check_power_cut(path, small, f" With 100 bytes the calls were {', '.join(map(str, small))}.")
    return f"valid after a kill at each of {len(calls)} calls, and after a power cut.{order}"
