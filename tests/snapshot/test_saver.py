"""Saves by a rank that has the whole state; test_transfer.py tests those of several ranks."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FaultyDisk
from support.snapshots import TENSORS, file_names, make_manifest, make_saver, make_store, newest, save, write

from mingpt.base.errors import ClaimLost
from mingpt.snapshot import Saver, Status, Store, Tier
from mingpt.snapshot.layout import Layout, step_of
from mingpt.snapshot.manifest import FileRecord

DISK: dict[str, Any] = {"name": "disk", "every": 10}
COPY: dict[str, Any] = {"name": "disk", "every": 10, "may_skip": True}  # on a node's own disk
MEMORY: dict[str, Any] = {"name": "memory", "every": 5, "may_skip": True, "is_durable": False}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


@pytest.mark.parametrize(
    ("settings", "step", "status", "is_due"),
    [
        (DISK, 10, Status(), True),
        (DISK, 11, Status(), False),
        (DISK, 11, Status(is_wanted=True), True),
        (DISK, 10, Status(is_busy=True), True),
        (DISK, 11, Status(is_wanted=True, is_busy=True), True),
        (DISK, 11, Status(is_end=True), True),
        (DISK, 11, Status(is_end=True, is_busy=True), True),
        (DISK | {"begun": 10}, 11, Status(is_end=True), True),
        (DISK | {"begun": 11}, 11, Status(is_end=True), False),
        (DISK | {"begun": 10}, 10, Status(is_wanted=True), True),
        (DISK | {"every": 0}, 10, Status(), False),
        (DISK | {"every": 0}, 10, Status(is_wanted=True), True),
        (DISK | {"every": 0}, 10, Status(is_end=True), True),
        (COPY, 10, Status(), True),
        (COPY, 10, Status(is_busy=True), False),
        (COPY, 11, Status(is_wanted=True), False),
        (COPY, 11, Status(is_end=True, is_busy=True), True),
        (MEMORY, 5, Status(), True),
        (MEMORY, 6, Status(), False),
        (MEMORY, 5, Status(is_busy=True), False),
        (MEMORY, 6, Status(is_wanted=True), False),
        (MEMORY, 5, Status(is_end=True), False),
        (MEMORY | {"every": 0}, 5, Status(), False),
    ],
)
def test_a_save_is_due_as_the_settings_and_the_present_state_say(
    settings: dict[str, Any], step: int, status: Status, is_due: bool
) -> None:
    """The main disk never leaves a save out; a copy and memory do while they are busy.

    The last step is saved to each disk that lacks it, and never to memory.
    """
    assert Tier(store=Store("memory://unused"), **settings).is_due(step, status) == is_due


def test_the_newest_and_the_best_are_kept(store: Store) -> None:
    saver = make_saver(store, keep=2, keep_best=True)
    for step, loss in ((1, 3.0), (2, 1.0), (3, None), (4, 2.0), (5, None)):
        saver.save(make_manifest(step, loss), TENSORS)
    saver.wait()
    assert store.steps() == [5, 4, 2]
    assert (saver.tiers[0].written, store.best) == (5, (1.0, 2))
    later = Store(store.url)
    save(make_saver(later, keep=1, keep_best=True), make_manifest(6, 3.0))
    assert store.steps() == [6, 2] and later.best == (1.0, 2), "the best one of an earlier generation"
    save(make_saver(later, keep=1), make_manifest(7))
    assert store.steps() == [7]


@pytest.mark.parametrize(
    ("replayed_step", "kept"), [(None, [9]), (9, [9]), (6, [9, 6]), (5, [9, 3]), (2, [9])]
)
def test_the_newest_snapshot_up_to_the_last_replay_is_kept(
    replayed_step: int | None, kept: list[int], store: Store
) -> None:
    """If workers later turn out to compute differently, this is the newest snapshot to trust."""
    for step in (3, 6, 9):
        write(store, make_manifest(step))
    store.prune(keep=1, keep_best=False, replayed_step=replayed_step)
    assert store.steps() == kept


def test_the_first_snapshot_of_a_generation_replaces_those_of_earlier_ones(tmp_path: Path) -> None:
    """Until the snapshot is complete, the earlier ones stay. What a user has put beside them stays, too."""
    earlier = [Store(str(tmp_path / name)) for name in ("a", "b")]
    own = make_store(tmp_path)
    for store in earlier:
        Path(store.root).mkdir()
        write(store, make_manifest(4))
    (tmp_path / "b" / "notes.txt").write_text("mine")
    saver = Saver([Tier("memory", own, keep=1, is_durable=False, replaces=[*earlier])])
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(patch, "replace", "partial-step_00000005.json")
        save(saver, make_manifest(5))
    assert isinstance(saver.tiers[0].error, OSError)
    assert [store.steps() for store in (*earlier, own)] == [[4], [4], []]
    save(saver, make_manifest(6))
    assert saver.tiers[0].error is None and own.steps() == [6]
    assert not (tmp_path / "a").exists() and os.listdir(tmp_path / "b") == ["notes.txt"]


def test_each_tier_is_written_whatever_happens_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure in memory is not logged here, because all ranks agree on it first."""
    stores = [Store(str(tmp_path / name)) for name in ("memory", "disk")]
    for store in stores:
        store.prepare()
    memory, disk = Tier("memory", stores[0], is_durable=False), Tier("disk", stores[1])
    saver, calls = Saver([memory, disk]), list[list[int]]()
    faulty = FaultyDisk(monkeypatch, "replace", "/memory/partial-step_00000001.saf")
    saver.save(make_manifest(1), TENSORS, before=lambda: calls.append(memory.store.steps()))
    saver.wait()
    assert isinstance(memory.error, OSError) and disk.error is None and caplog.messages == []
    assert (memory.written, disk.written, memory.begun, disk.begun) == (0, 1, 1, 1)
    assert calls == [[]], "`before` is called once"
    faulty.name = "/disk/partial-step_00000002.saf"
    saver.save(make_manifest(2), TENSORS, before=lambda: calls.append(memory.store.steps()))
    saver.wait()
    assert isinstance(disk.error, OSError) and memory.error is None and len(caplog.messages) == 1
    assert calls[1:] == [[2]], "memory comes first"
    saver.save(make_manifest(3), TENSORS, [memory], before=lambda: calls.append([]))
    saver.wait()
    assert [store.steps() for store in stores] == [[3, 2], [1]] and len(calls) == 2
    assert (memory.begun, disk.begun) == (3, 2)


def test_a_rank_that_writes_nothing_of_a_whole_state_takes_no_part(store: Store) -> None:
    saver = Saver([Tier("disk", store, writers=[0, 2])], rank=1)
    assert not saver.takes_part(saver.tiers[0])
    save(saver, make_manifest(1))
    assert file_names(store) == [] and saver.staging is not None and not saver.staging.slots
    save(Saver([Tier("disk", store, writers=[0, 2])], rank=2), make_manifest(1))
    assert store.steps() == [1]


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


def test_on_a_full_disk_the_snapshots_before_stay_and_the_next_save_tries_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make_saver(store)
    for step in (1, 2):
        save(saver, make_manifest(step, float(step)))
    disk = FullDisk(monkeypatch, store, room=2)
    save(saver, make_manifest(3))
    (tier,) = saver.tiers
    assert isinstance(tier.error, OSError) and store.steps() == [2, 1]
    assert (tier.begun, tier.written) == (3, 2)
    assert caplog.messages[-1] == "snapshot of step 3 could not be written: no room"
    disk.room = 3
    save(saver, make_manifest(4))
    assert store.steps() == [4, 2, 1] and tier.error is None


def test_a_snapshot_that_is_written_again_stays_valid_if_that_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again where an evaluation that was cut short is made before training goes on."""
    saver = make_saver(store)
    save(saver, make_manifest(5))
    with monkeypatch.context() as full:
        FullDisk(full, store, room=0)
        save(saver, make_manifest(5, 1.0))
    assert store.steps() == [5] and "val" not in store.read(5).manifest.metrics
    save(saver, make_manifest(5, 1.0))
    assert store.read(5).manifest.metrics["val"]["val/loss"] == 1.0


def test_a_job_that_is_superseded_removes_nothing(store: Store) -> None:
    calls: list[None] = []

    def lose_claim() -> None:
        calls.append(None)
        if len(calls) == 4:
            raise ClaimLost("for a test")

    store.check_claim = lose_claim
    with pytest.raises(ClaimLost):
        write(store, make_manifest(3))
    assert file_names(store) == ["partial-step_00000003", "step_00000003.safetensors"]


def test_a_failure_to_remove_old_snapshots_is_a_line_and_the_new_one_is_valid(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make_saver(store, keep=1)
    save(saver, make_manifest(1))
    FaultyDisk(monkeypatch, "remove", "step_00000001", errno.EIO)
    save(saver, make_manifest(2))
    assert caplog.messages == ["old snapshots could not be removed: Input/output error"]
    assert saver.tiers[0].error is None and newest(store) == (2, {})
    assert all(torch.equal(store.read(2).read(name), tensor) for name, tensor in TENSORS.items())
