"""Snapshots in memory of a state that one rank holds, and the folders of runs there."""

import logging
import os
import platform
import shutil
import time
import uuid
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.faults import FaultyDisk
from support.ranks import lone_rank
from support.snapshots import make_manifest

from mingpt.base.rows import RowMap
from mingpt.snapshot import MemorySaver, MemorySnapshots, Store


def make_state(step: int) -> dict[str, torch.Tensor]:
    return {"model.a": torch.full((100,), float(step)), "model.b": torch.tensor(step)}


def make_saver(path: Path, run_id: str = "abc", run_dir: Path | None = None) -> MemorySaver:
    """The saver of a generation's only rank."""
    return MemorySaver(
        MemorySnapshots(str(path), run_id, run_dir or path), lone_rank(), RowMap({}), uuid.uuid4().hex
    )


def save(memory: MemorySaver, *steps: int) -> None:
    """Save these steps, and wait for the end of each."""
    for step in steps:
        memory.save(make_manifest(step), make_state(step))
        if memory.thread:
            memory.thread.join()


def found(memory: MemorySaver) -> list[int]:
    """The steps in all folders of the run; also reads and compares what they hold."""
    steps = []
    for store in memory.snapshots.stores():
        for step in store.steps():
            for name, tensor in store.read(step).tensors().items():
                assert torch.equal(tensor, make_state(step)[name])
            steps.append(step)
    return sorted(steps)


@pytest.fixture
def memory(tmp_path: Path) -> MemorySaver:
    return make_saver(tmp_path)


def test_where_there_is_no_such_folder_it_says_so_once_and_is_off(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(make_saver(tmp_path / "absent"), 5, 10)
    (line,) = caplog.messages
    assert line.startswith(f"no snapshots in memory: {tmp_path}/absent cannot be used (No such file")
    assert f", on {platform.node()}); after a kill" in line


def test_no_more_than_two_states_are_kept_those_of_earlier_generations_included(memory: MemorySaver) -> None:
    save(memory, 5)
    assert found(memory) == [5]
    save(memory, 10, 15)
    assert found(memory) == [10, 15]
    later = make_saver(memory.snapshots.root.parent)
    later.snapshots.make_room(15)
    assert found(later) == [15]
    save(later, 20)
    assert found(later) == [15, 20], "that of the earlier generation stays until there are two newer ones"
    save(later, 25)
    assert found(later) == [20, 25] and len(later.snapshots.folders()) == 1


def test_generations_that_save_once_leave_one_state_each_time(memory: MemorySaver) -> None:
    """Otherwise their states would fill the memory."""
    for step in (5, 10, 15):
        save(memory, step)
        memory = make_saver(memory.snapshots.root.parent)
        memory.snapshots.make_room(step)
        assert found(memory) == [step]


def test_what_a_generation_did_not_start_from_does_not_come_back(memory: MemorySaver) -> None:
    save(memory, 25, 30)
    later = make_saver(memory.snapshots.root.parent)
    later.snapshots.make_room(25)
    assert found(later) == [25]
    later.snapshots.make_room(-1)
    assert found(later) == []


def test_another_run_and_a_copy_of_the_run_folder_see_nothing(memory: MemorySaver, tmp_path: Path) -> None:
    save(memory, 5)
    assert (
        found(make_saver(tmp_path, run_id="abd")) == found(make_saver(tmp_path, run_dir=tmp_path / "b")) == []
    )


def test_a_save_that_a_kill_cut_off_is_none_and_the_one_before_is_valid(
    memory: MemorySaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(memory, 5)
    with monkeypatch.context() as patch:
        patch.setattr(memory.own.store, "commit", lambda manifest: (_ for _ in ()).throw(SystemExit))
        patch.setattr("threading.excepthook", lambda arguments: None)
        save(memory, 10)
    assert memory.own.store.steps("safetensors") == [10, 5]
    assert found(memory) == [5]


@pytest.mark.parametrize("reason", ["full", "gone", "small"])
def test_where_a_write_fails_the_memory_is_freed_and_one_line_says_so(
    reason: str,
    memory: MemorySaver,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if reason == "small":
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=900))
    else:
        save(memory, 5)
    if reason == "gone":
        shutil.rmtree(memory.snapshots.root)
    elif reason == "full":
        FaultyDisk(monkeypatch, "replace", "partial-step_00000010.saf")
    save(memory, 10, 15, 20)
    (line,) = caplog.messages
    expected = {"full": "No space left", "gone": "No such file", "small": "No space left for two states"}
    assert line.startswith(f"no snapshots in memory: {tmp_path} cannot be used ({expected[reason]}")
    assert list(tmp_path.iterdir()) == []


def test_an_orderly_end_removes_the_snapshots_of_all_generations(memory: MemorySaver, tmp_path: Path) -> None:
    save(memory, 5)
    later = make_saver(tmp_path)
    save(later, 10)
    later.remove()
    assert list(tmp_path.iterdir()) == []


def make_old(root: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    for path in (*root.rglob("*"), root):
        os.utime(path, (then, then))


def test_what_a_run_left_is_removed_after_a_day_and_what_a_user_put_there_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    roots, ages = {}, {"old": 24.1, "mixed": 24.1, "recent": 23.9, "own": 100}
    for name in ages:
        memory = make_saver(tmp_path, uuid.uuid4().hex)
        save(memory, 5)
        roots[name] = memory.snapshots.root
    notes = (
        tmp_path / "mingpt-distributed" / "notes.txt",
        *(folder / "notes.txt" for folder in (roots["mixed"], *roots["own"].iterdir())),
    )
    for path in notes:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    for name, hours in ages.items():
        make_old(roots[name], hours)
    make_old(notes[0].parent, 100)
    (tmp_path / f"mingpt-{uuid.uuid4().hex}-01234567").symlink_to(roots["old"])
    memory.snapshots.remove_leftovers()
    assert [name for name, root in roots.items() if root.exists()] == ["mixed", "recent", "own"]
    assert os.listdir(roots["mixed"]) == ["notes.txt"]
    assert len(caplog.records) == 2 and str(roots["old"]) in caplog.text
    assert Store(str(memory.own.store.url)).steps() == [5]
    memory.snapshots.make_room(-1)
    memory.remove()
    assert [path.read_text() for path in notes] == ["mine"] * 3


@pytest.mark.parametrize("planted", ["a link", "writable by others", "another user's"])
def test_a_folder_to_which_another_user_can_write_is_neither_used_nor_touched(
    planted: str, memory: MemorySaver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder's name can be guessed by whoever can read run.json."""
    save(memory, 5)
    root = memory.snapshots.root
    if planted == "a link":
        (tmp_path / "target").mkdir()
        root = root.rename(tmp_path / "target" / root.name)
        memory.snapshots.root.symlink_to(root)
    elif planted == "writable by others":
        root.chmod(0o777)
    elif os.getuid():
        pytest.skip("only root can give a folder to another user")
    else:
        os.chown(root, 12345, 12345)
    content = {path: path.lstat().st_mtime_ns for path in root.rglob("*")}
    later = make_saver(tmp_path)
    assert later.snapshots.stores() == []
    later.snapshots.make_room(-1)
    save(later, 10)
    later.remove()
    assert {path: path.lstat().st_mtime_ns for path in root.rglob("*")} == content
    (line,) = caplog.messages
    assert f"({memory.snapshots.root.name} there is a link, or another user can write to it, on" in line
