"""Check exercise 4: a snapshot that is valid whenever the process is killed, or the power fails."""

import tempfile
import time
from pathlib import Path

from tutorial.checks.files import Call, Recorder
from tutorial.checks.processes import LIMIT_S, Place, Process, Refused, describe_hang, wait_for_all

SIZE = 300_000
OLD, NEW, THIRD = (bytes([letter]) * SIZE for letter in b"onx")
ONLY_SNAPSHOT = "See tutorial/mistakes/only_snapshot.py."


def task(place: Place, path: Path, data: bytes, stop_at: int | None, pause: Path | None) -> list[Call]:
    recorder = Recorder(stop_at, pause)
    place.load("save")(path, data)
    return recorder.calls


def start(answer: Path, path: Path, data: bytes, stop_at: int | None = None, pause: bool = False) -> Process:
    """Begin to save in a new process, with a folder beside the snapshot's for what the check needs."""
    control = Path(tempfile.mkdtemp(dir=path.parent.parent))
    return Process(Place(answer, control, 0, 1), task, path, data, stop_at, control if pause else None)


def wait_while_running(process: Process, paused: bool = False) -> None:
    """Until the process has ended, or waits in a pause."""
    deadline = time.monotonic() + LIMIT_S
    while process.poll() == "runs" and not (paused and (process.place.folder / "paused").exists()):
        if time.monotonic() > deadline:
            raise Refused(describe_hang([process], LIMIT_S))
        time.sleep(0.002)


def save(answer: Path, path: Path, data: bytes) -> list[Call]:
    """Save without a kill; raises Refused if the file is not what was saved."""
    process = start(answer, path, data)
    try:
        calls: list[Call] = wait_for_all([process])[0]
    finally:
        process.kill()
    if not path.exists() or path.read_bytes() != data:
        raise Refused(f"save returned, and {path.name} is not what was to be saved ({describe_file(path)}).")
    left = sorted(other.name for other in path.parent.iterdir() if other != path)
    if left:
        raise Refused(f"save returned, and left other files behind: {', '.join(left)}.")
    return calls


def describe_file(path: Path) -> str:
    if not path.exists():
        return "there is no such file"
    content = path.read_bytes()
    return (
        f"it has {len(content):,} of {SIZE:,} bytes"
        if len(content) != SIZE
        else "old and new bytes are mixed"
    )


def kill_at(answer: Path, root: Path, calls: list[Call], number: int) -> None:
    """Raises Refused unless a kill there leaves the old or the new snapshot, and the next save works."""
    path = make_folder(root) / "snapshot"
    path.write_bytes(OLD)
    process = start(answer, path, NEW, number)
    try:
        wait_while_running(process)
    finally:
        process.kill()
    where = f"Killed at call {number + 1} of {len(calls)}, {calls[number]}:"
    if not path.exists() or path.read_bytes() not in (OLD, NEW):
        text = f"{where} {path.name} is no snapshot, {describe_file(path)}."
        if not path.exists():
            raise Refused(
                f"{text} The old one has to stay until the new one is whole; os.replace removes it."
            )
        raise Refused(f"{text} The new one is written over the only one. {ONLY_SNAPSHOT}")
    try:
        process = start(answer, path, THIRD)
        wait_for_all([process])
    except Refused as refusal:
        raise Refused(f"{where} the next save fails, beside what was left. {refusal}") from None
    finally:
        process.kill()
    if path.read_bytes() != THIRD:
        raise Refused(f"{where} the next save leaves something else than what was to be saved.")


def save_two(answer: Path, root: Path, calls: list[Call], number: int) -> None:
    """Raises Refused unless two processes can save different snapshots of one folder at the same time."""
    folder = make_folder(root)
    first, second = folder / "snapshot.0", folder / "snapshot.1"
    text = (
        f"One process saved {first.name}; before its call {number + 1}, {calls[number]}, another one saved "
    )
    text += f"{second.name} in the same folder. Afterwards"
    slow = start(answer, first, OLD, number, pause=True)
    fast = None
    try:
        wait_while_running(slow, paused=True)
        fast = start(answer, second, NEW)
        wait_for_all([fast])
        (slow.place.folder / "go").mkdir()
        wait_for_all([slow])
    except Refused as refusal:
        raise Refused(f"{text} one failed: do they use the same temporary file? {refusal}") from None
    finally:
        for process in (slow, fast):
            if process:
                process.kill()
    for path, data in ((first, OLD), (second, NEW)):
        if not path.exists() or path.read_bytes() != data:
            raise Refused(f"{text} {path.name} has other bytes: do they use the same temporary file?")


def make_folder(root: Path) -> Path:
    folder = Path(tempfile.mkdtemp(dir=root)) / "snapshots"
    folder.mkdir()
    return folder


def inside_writes(calls: list[Call], number: int) -> bool:
    """Whether a call is one of many writes, and neither the first nor the last of them."""
    return 0 < number < len(calls) - 1 and all(
        call.name == "write" for call in calls[number - 1 : number + 2]
    )


def describe_calls(calls: list[Call]) -> str:
    shown = ["..." if inside_writes(calls, number) else str(call) for number, call in enumerate(calls)]
    return ", ".join(word for number, word in enumerate(shown) if word != "..." or shown[number - 1] != "...")


def check_power_cut(path: Path, calls: list[Call]) -> None:
    """Raises Refused unless the order of calls is safe: a kill keeps what the kernel has, a power cut not."""
    renames = [
        n for n, call in enumerate(calls) if call.name in RENAMES and Path(call.target).name == path.name
    ]
    if not renames:
        raise Refused(
            "No rename to the snapshot's name was seen: write by open() or os.open(), then os.replace."
        )
    last = renames[-1]
    inode, source = calls[last].inode, Path(calls[last].path)
    if source.parent.name != path.parent.name:
        raise Refused(
            f"The temporary file lies in {source.parent}: os.replace works only within one file system. Write "
            "it in the folder of the snapshot."
        )
    writes = [n for n, call in enumerate(calls) if call.name == "write" and call.inode == inode]
    syncs = [n for n, call in enumerate(calls) if call.name == "fsync" and call.inode == inode]
    folder = path.parent.stat().st_ino
    folder_syncs = [n for n, call in enumerate(calls) if call.name == "fsync" and call.inode == folder]
    order = f" The calls were {describe_calls(calls)}."
    if not writes:
        raise Refused(f"No write to {source.name} was seen: write by open() or os.open().{order}")
    if not any(writes[-1] < sync < last for sync in syncs):
        if any(sync < writes[-1] for sync in syncs):
            late = sum(calls[n].bytes for n in writes if n > syncs[0])
            text = f"{late:,} bytes are written after the fsync: Python had them in its buffer. "
            text += "Call flush() before."
        else:
            text = f"{source.name} is renamed before an fsync: after a power cut the name may stand for "
            text += "an empty file."
        raise Refused(text + order)
    if not any(sync > last for sync in folder_syncs):
        when = "fsynced before the rename" if folder_syncs else "not fsynced"
        raise Refused(
            f"The folder is {when}, and has to be fsynced after it: a power cut may bring back the old "
            f"snapshot, though save has returned.{order}"
        )


def check(answer: Path) -> str:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        save(answer, make_folder(root) / "snapshot", NEW)  # the first one
        path = make_folder(root) / "snapshot"
        path.write_bytes(OLD)
        calls = save(answer, path, NEW)
        if not calls:
            raise Refused("No write was seen: write by open() or os.open().")
        numbers = [number for number in range(len(calls)) if not inside_writes(calls, number)]
        for number in numbers:
            kill_at(answer, root, calls, number)
        for number in numbers:
            save_two(answer, root, calls, number)
        check_power_cut(path, calls)
    return (
        f"valid after a kill at each of {len(calls)} calls, and after a power cut: {describe_calls(calls)}."
    )
