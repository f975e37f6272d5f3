import errno
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.snapshots import TENSORS, make_manifest, make_store, save

from mingpt.snapshot import SnapshotSaver, SnapshotStore
from mingpt.snapshot.layout import FileLayout, step_of
from mingpt.snapshot.manifest import FileRecord


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return make_store(tmp_path)


def test_the_newest_and_the_best_are_kept(store: SnapshotStore) -> None:
    saver = SnapshotSaver(store, keep_last=2, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        saver.save(make_manifest(step, loss), TENSORS)
    saver.finish()
    assert store.steps() == [5, 4, 2]
    assert saver.newest_written == 5
    later = SnapshotSaver(store, keep_last=1, keep_best=True)
    save(later, make_manifest(6, 3.0))
    assert store.steps() == [6, 2], "the best one of an earlier generation"
    save(SnapshotSaver(store, keep_last=1, keep_best=False), make_manifest(7))
    assert store.steps() == [7]


class FullDisk:
    """A disk with room for `room` snapshots; removing one makes room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: SnapshotStore, room: int) -> None:
        self.real, self.store, self.room, self.code = store.write_file, store, room, errno.ENOSPC
        monkeypatch.setattr(store, "write_file", self.write_file)

    def write_file(self, layout: FileLayout, chunks: Iterable[memoryview]) -> FileRecord:
        steps = {*self.store.steps("safetensors"), step_of(layout.name)}
        if len(steps) > self.room:
            raise OSError(self.code, "no room")
        return self.real(layout, chunks)


def saver_with(
    store: SnapshotStore, losses: dict[int, float | None], keep_best: bool = True
) -> SnapshotSaver:
    """A saver that has written snapshots with these validation losses by step."""
    saver = SnapshotSaver(store, keep_last=100, keep_best=keep_best)
    for step, loss in losses.items():
        save(saver, make_manifest(step, loss))
    return saver


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_where_there_is_no_room_older_ones_go_the_best_one_last(
    code: int, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_with(store, {1: 1.0, 2: 3.0, 3: 2.0, 4: 2.5})
    disk = FullDisk(monkeypatch, store, room=4)
    disk.code = code
    for room, step, kept in ((4, 5, [5, 4, 3, 1]), (3, 6, [6, 5, 1]), (2, 7, [7, 6])):
        disk.room = room
        save(saver, make_manifest(step, 5.0))
        assert (saver.error, store.steps()) == (None, kept)
    assert caplog.messages[0] == "snapshot of step 2 is removed: there was no room for that of step 5"
    assert len(caplog.messages) == 5


@pytest.mark.parametrize(("code", "kept"), [(errno.ENOSPC, [2]), (errno.EIO, [2, 1])])
def test_the_only_one_is_not_removed_for_the_next_and_none_if_the_disk_is_not_full(
    code: int,
    kept: list[int],
    store: SnapshotStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saver = saver_with(store, {1: 1.0, 2: 2.0})
    FullDisk(monkeypatch, store, room=0).code = code
    save(saver, make_manifest(3))
    assert isinstance(saver.error, OSError)
    assert store.steps() == kept
    assert caplog.messages[-1] == "snapshot of step 3 could not be written: no room"


def test_a_snapshot_that_is_written_again_stays_valid_if_that_fails(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again where an evaluation that was cut short is made before training goes on."""
    saver = saver_with(store, {5: None})
    with monkeypatch.context() as full:
        FullDisk(full, store, room=0)
        save(saver, make_manifest(5, 1.0))
    assert store.steps() == [5] and "val" not in store.read(5).manifest["metrics"]
    save(saver, make_manifest(5, 1.0))
    assert store.read(5).manifest["metrics"]["val"]["val/loss"] == 1.0


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
def test_the_newest_that_is_valid_is_kept_and_not_a_damaged_one(
    kind: str, store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = saver_with(store, {1: 1.0, 2: 2.0, 3: 3.0})
    path = Path(store.path(f"step_00000003.{kind}"))
    path.write_bytes(path.read_bytes()[:-3] + b"???")
    FullDisk(monkeypatch, store, room=0)
    save(saver, make_manifest(4))
    assert store.steps() == [3, 2]
    store.read(2)
