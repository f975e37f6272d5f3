import errno
from collections.abc import Iterable
from pathlib import Path

import pytest
from support.snapshots import TENSORS, make_manifest, make_store, save

from mingpt.snapshot import Keep, Saver, Store
from mingpt.snapshot.layout import Layout, step_of
from mingpt.snapshot.manifest import FileRecord


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


def test_the_newest_and_the_best_are_kept(store: Store) -> None:
    saver = Saver(store)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        saver.save(make_manifest(step, loss), TENSORS, Keep(last=2, best=True))
    saver.wait()
    assert store.steps() == [5, 4, 2]
    assert saver.newest_written == 5
    later = Saver(store)
    save(later, make_manifest(6, 3.0), keep=Keep(last=1, best=True))
    assert store.steps() == [6, 2], "the best one of an earlier generation"
    save(later, make_manifest(7), keep=Keep(last=1))
    assert store.steps() == [7]


class FullDisk:
    """A disk with room for `room` snapshots; removing one makes room."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, store: Store, room: int) -> None:
        self.real, self.store, self.room = store.write_file, store, room
        monkeypatch.setattr(store, "write_file", self.write_file)

    def write_file(self, layout: Layout, chunks: Iterable[memoryview]) -> FileRecord:
        steps = {*self.store.steps("safetensors"), step_of(layout.name)}
        if len(steps) > self.room:
            raise OSError(errno.ENOSPC, "no room")
        return self.real(layout, chunks)


def saver_with(store: Store, losses: dict[int, float | None]) -> Saver:
    """A saver that has written snapshots with these validation losses by step."""
    saver = Saver(store)
    for step, loss in losses.items():
        save(saver, make_manifest(step, loss))
    return saver


def test_on_a_full_disk_the_snapshots_before_stay_and_the_next_save_tries_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = saver_with(store, {1: 1.0, 2: 2.0})
    disk = FullDisk(monkeypatch, store, room=2)
    save(saver, make_manifest(3))
    assert isinstance(saver.error, OSError) and store.steps() == [2, 1]
    assert caplog.messages[-1] == "snapshot of step 3 could not be written: no room"
    disk.room = 3
    save(saver, make_manifest(4))
    assert store.steps() == [4, 2, 1]


def test_a_snapshot_that_is_written_again_stays_valid_if_that_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again where an evaluation that was cut short is made before training goes on."""
    saver = saver_with(store, {5: None})
    with monkeypatch.context() as full:
        FullDisk(full, store, room=0)
        save(saver, make_manifest(5, 1.0))
    assert store.steps() == [5] and "val" not in store.read(5).manifest.metrics
    save(saver, make_manifest(5, 1.0))
    assert store.read(5).manifest.metrics["val"]["val/loss"] == 1.0
