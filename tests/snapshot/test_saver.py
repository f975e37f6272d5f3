import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshots import CONTENT, TENSORS, make_manifest, make_store

from mingpt.errors import SaveAborted
from mingpt.snapshot import SnapshotSaver, SnapshotStore


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
    other = SnapshotSaver(store, keep_last=1, keep_best=False)
    other.save(make_manifest(6), TENSORS)
    other.finish()
    assert store.steps() == [6]


def test_the_best_of_an_earlier_generation_is_kept(store: SnapshotStore) -> None:
    for step, loss in ((1, 1.0), (2, 2.0)):
        store.write(make_manifest(step, loss), CONTENT)
    saver = SnapshotSaver(store, keep_last=1, keep_best=True)
    saver.save(make_manifest(3, 3.0), TENSORS)
    saver.finish()
    assert store.steps() == [3, 1]


def test_a_write_that_fails_is_reported_and_training_goes_on(
    store: SnapshotStore, caplog: pytest.LogCaptureFixture
) -> None:
    saver = SnapshotSaver(store, keep_last=2, keep_best=True)
    shutil.rmtree(store.root)
    saver.save(make_manifest(1), TENSORS)
    with pytest.raises(FileNotFoundError):
        saver.finish()
    assert "snapshot of step 1 could not be written" in caplog.text
    assert saver.newest_written == 0
    store.prepare()
    saver.save(make_manifest(2), TENSORS)
    saver.finish()
    assert store.steps() == [2]


def test_a_removal_that_was_cut_short_is_completed_later(store: SnapshotStore) -> None:
    for step in (1, 2):
        store.write(make_manifest(step), CONTENT)
    Path(store.path("step_00000001.json")).unlink()
    saver = SnapshotSaver(store, keep_last=1, keep_best=False)
    saver.save(make_manifest(3), TENSORS)
    saver.finish()
    assert store.steps("safetensors") == [3]


def test_the_tensors_may_change_while_they_are_written(store: SnapshotStore) -> None:
    """The write waits for a field that is computed later; the file has the values from before."""
    changed = threading.Event()
    state = {"model.a": torch.zeros(1000)}

    def late_fields() -> dict[str, Any]:
        assert changed.wait(30)
        return {"audit": "1" * 64}

    saver = SnapshotSaver(store, keep_last=1, keep_best=False)
    saver.save(make_manifest(1), state, late_fields)
    assert not saver.wait(timeout_s=0.0)
    state["model.a"].fill_(1.0)
    changed.set()
    saver.finish()
    assert saver.wait(timeout_s=0.0)
    snapshot = store.read(1)
    assert snapshot.manifest["audit"] == "1" * 64
    assert torch.equal(snapshot.tensors()["model.a"], torch.zeros(1000))


def test_a_save_that_needs_a_lost_peer_leaves_no_snapshot_and_no_warning(
    store: SnapshotStore, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)

    def late_fields() -> dict[str, Any]:
        raise SaveAborted

    saver = SnapshotSaver(store, keep_last=1, keep_best=False)
    saver.save(make_manifest(1), TENSORS, late_fields)
    with pytest.raises(SaveAborted):
        saver.finish()
    assert store.steps() == []
    assert caplog.records == []
