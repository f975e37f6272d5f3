"""The folders of runs and of their generations in a node's memory."""

import os
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.snapshots import make_manifest, write

from mingpt.snapshot import MemoryFolder, Store


def make_folder(path: Path, run_id: str = "", run_dir: Path | None = None) -> MemoryFolder:
    return MemoryFolder(str(path), run_id or 32 * "a", run_dir or path)


def make_generation(memory: MemoryFolder, nbytes: int = 0) -> Store:
    """A new Store of a generation, whose folder has been created."""
    store = Store(str(memory.root / uuid.uuid4().hex))
    memory.create(store, nbytes)
    return store


def steps_in(memory: MemoryFolder) -> list[list[int]]:
    return sorted(store.steps() for store in memory.stores())


@pytest.fixture
def memory(tmp_path: Path) -> MemoryFolder:
    return make_folder(tmp_path)


def test_what_a_generation_does_not_start_from_does_not_come_back(memory: MemoryFolder) -> None:
    assert memory.stores() == []
    for steps in ((25, 30), (25,), (35,)):
        store = make_generation(memory)
        for step in steps:
            write(store, make_manifest(step))
    assert steps_in(memory) == [[25], [30, 25], [35]]
    memory.clear(25)
    assert steps_in(memory) == [[25], [25]]
    memory.clear()
    assert not memory.root.exists()


def test_a_copy_of_the_run_folder_and_another_run_have_other_folders(tmp_path: Path) -> None:
    write(make_generation(make_folder(tmp_path)), make_manifest(5))
    assert steps_in(make_folder(tmp_path)) == [[5]]
    assert steps_in(make_folder(tmp_path, 32 * "b")) == []
    assert steps_in(make_folder(tmp_path, run_dir=tmp_path / "b")) == []


def test_memory_must_have_room_for_two_states_and_older_snapshots_count_as_room(
    memory: MemoryFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(make_generation(memory), make_manifest(5))
    used = sum(path.stat().st_size for path in memory.root.rglob("step_*"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5 * used))
    make_generation(memory, 3 * used)
    with pytest.raises(OSError, match=r"^\[Errno 28\] No space left for two states"):
        make_generation(memory, 3 * used + 1)
    assert steps_in(memory) == [[], [5]], "the generation that has no room has no folder"


def test_what_a_run_left_is_removed_after_a_day_and_what_a_user_put_there_stays(tmp_path: Path) -> None:
    folders = {}
    for name, hours in {"old": 24.1, "mixed": 24.1, "recent": 23.9, "own": 100}.items():
        folders[name] = make_folder(tmp_path, uuid.uuid4().hex)
        store = make_generation(folders[name])
        write(store, make_manifest(5))
        then = time.time() - 3600 * hours
        os.utime(store.root, (then, then))
    (folders["mixed"].root / "notes.txt").write_text("mine")
    folders["own"].remove_leftovers()
    assert [name for name, folder in folders.items() if folder.root.exists()] == ["mixed", "recent", "own"]
    assert os.listdir(folders["mixed"].root) == ["notes.txt"]
    assert steps_in(folders["recent"]) == steps_in(folders["own"]) == [[5]]


@pytest.mark.parametrize(
    "plant",
    [lambda root: root.symlink_to(root.rename(root.parent / "target")), lambda root: root.chmod(0o777)],
    ids=["a link", "writable by others"],
)
def test_a_folder_to_which_another_user_can_write_is_neither_used_nor_touched(
    plant: Callable[[Path], None], memory: MemoryFolder
) -> None:
    """The folder's name can be guessed by whoever can read run.json."""
    write(make_generation(memory), make_manifest(5))
    plant(memory.root)
    content = {path: path.lstat().st_mtime_ns for path in memory.root.resolve().rglob("*")}
    assert memory.stores() == []
    memory.clear()
    with pytest.raises(OSError, match="there is a link, or another user can write to it"):
        make_generation(memory)
    assert {path: path.lstat().st_mtime_ns for path in memory.root.resolve().rglob("*")} == content != {}
