"""Saves by a rank that has the whole state; test_transfer.py tests those of several ranks."""

import errno
import math
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.faults import FaultyDisk
from support.snapshots import TENSORS, file_names, make_manifest, make_saver, make_store, newest, save, write

from mingpt.base.errors import ClaimLost
from mingpt.snapshot import Saver, Status, Store, Tier

DISK: dict[str, Any] = {"name": "disk", "every": 10}
COPY: dict[str, Any] = {"name": "disk", "every": 10, "may_skip": True}  # on a node's own disk
MEMORY: dict[str, Any] = {"name": "memory", "every": 5, "may_skip": True, "is_durable": False}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


@pytest.mark.parametrize(
    ("tier", "step", "status", "is_due"),
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
    tier: dict[str, Any], step: int, status: Status, is_due: bool
) -> None:
    """The main disk never leaves a save out; a copy and memory do while they are busy.

    The last step is saved to each disk that lacks it, and never to memory.
    """
    assert Tier(store=Store("memory://unused"), **tier).is_due(step, status) == is_due


# (steps since the save before, validation loss, steps since the last replay)
SAVES = st.tuples(st.integers(1, 3), st.sampled_from([None, 1.0, 2.0, 3.0]), st.none() | st.integers(0, 6))


@settings(max_examples=30, derandomize=True, deadline=None)
@given(saves=st.lists(SAVES, min_size=1, max_size=6), keep=st.integers(1, 3), keep_best=st.booleans())
def test_the_newest_the_best_and_the_newest_up_to_the_last_replay_are_kept(
    saves: list[tuple[int, float | None, int | None]], keep: int, keep_best: bool
) -> None:
    """If workers later turn out to compute differently, the last of these is the newest to trust.

    Each save is made by another generation, which knows of earlier ones only what it finds in the folder.
    """
    url, losses, step = f"memory://{uuid.uuid4().hex}/snapshots", dict[int, float](), 0
    for steps, loss, since_replay in saves:
        step += steps
        replayed_step = None if since_replay is None else max(0, step - since_replay)
        saver = make_saver(Store(url), keep, keep_best)
        save(saver, make_manifest(step, loss, replayed_step=replayed_step))
        losses[step] = math.inf if loss is None else loss
        expected = set(sorted(losses)[-keep:])
        expected |= {max((old for old in losses if old <= (replayed_step or -1)), default=step)}
        if keep_best and min(losses.values()) < math.inf:
            expected |= {min(losses, key=lambda old: (losses[old], old))}
        losses = {old: losses[old] for old in expected}
        store = saver.tiers[0].store
        assert store.steps() == sorted(expected, reverse=True)
        assert store.best[0] == min(losses.values()) and losses.get(store.best[1], math.inf) == store.best[0]


def test_the_first_snapshot_of_a_generation_replaces_those_of_earlier_ones(tmp_path: Path) -> None:
    """Until the snapshot is complete, the earlier ones stay. What a user has put beside them stays, too."""
    earlier, own = Store(str(tmp_path / "earlier")), make_store(tmp_path)
    Path(earlier.root).mkdir()
    write(earlier, make_manifest(4))
    (tmp_path / "earlier" / "notes.txt").write_text("mine")
    saver = Saver([Tier("memory", own, keep=1, is_durable=False, replaces=[earlier])])
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(patch, "replace", "partial-step_00000005.json")
        save(saver, make_manifest(5))
    assert isinstance(saver.tiers[0].error, OSError) and (earlier.steps(), own.steps()) == ([4], [])
    save(saver, make_manifest(6))
    assert saver.tiers[0].error is None and own.steps() == [6]
    assert file_names(earlier) == ["notes.txt"]


@pytest.mark.parametrize("broken", ["memory", "disk"])
def test_each_tier_is_written_whatever_happens_to_the_other(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure in memory is not logged here, because all ranks agree on it first."""
    names, seen = ("memory", "disk"), list[list[int]]()
    memory, disk = tiers = [
        Tier(name, make_store(tmp_path / name), is_durable=name == "disk") for name in names
    ]
    FaultyDisk(monkeypatch, "replace", f"/{broken}/snapshots/partial-step_00000001.saf")
    saver = Saver(tiers)
    saver.save(make_manifest(1), TENSORS, before=lambda: seen.append(memory.store.steps()))
    saver.wait()
    for tier in tiers:
        steps = [] if tier.name == broken else [1]
        assert (tier.store.steps(), tier.begun, tier.written) == (steps, 1, sum(steps))
        assert (tier.error is None) == bool(steps)
    assert seen == [memory.store.steps()], "memory comes first, and `before` is called once"
    assert len(caplog.messages) == (broken == "disk")
    saver.save(make_manifest(2), TENSORS, [memory])
    saver.wait()
    assert (memory.written, memory.error, disk.begun) == (2, None, 1)


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_writes_nothing_of_a_whole_state_takes_no_part(rank: int, store: Store) -> None:
    saver = Saver([Tier("disk", store, writers=[0, 2])], rank=rank)
    save(saver, make_manifest(1))
    assert store.steps() == ([1] if rank == 2 else []) and saver.staging
    assert saver.takes_part(saver.tiers[0]) == bool(saver.staging.slots) == (rank == 2)


def test_on_a_full_disk_the_snapshots_before_stay_and_the_next_save_tries_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saver = make_saver(store)
    save(saver, make_manifest(2))
    before = file_names(store)
    FaultyDisk(monkeypatch, "fsync", "step_00000003.optimizer")
    save(saver, make_manifest(3))
    (tier,) = saver.tiers
    assert isinstance(tier.error, OSError) and (tier.begun, tier.written) == (3, 2)
    assert file_names(store) == before, "the space of a failed save is free again"
    assert caplog.messages == ["snapshot of step 3 could not be written: No space left on device"]
    save(saver, make_manifest(4))
    assert store.steps() == [4, 2] and tier.error is None


def test_a_snapshot_that_is_written_again_stays_valid_if_that_fails(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is saved again where an evaluation that was cut short is made before training goes on."""
    saver = make_saver(store)
    save(saver, make_manifest(5))
    full = FaultyDisk(monkeypatch, "fsync", "step_00000005.optimizer")
    save(saver, make_manifest(5, 1.0))
    assert full.hits and "val" not in store.read(5).manifest.metrics
    full.broken = False
    save(saver, make_manifest(5, 1.0))
    assert store.read(5).manifest.metrics["val"]["val/loss"] == 1.0


def test_a_job_that_is_superseded_removes_nothing(store: Store) -> None:
    store.check_claim = Mock(side_effect=[None, None, None, ClaimLost("for a test")])
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
