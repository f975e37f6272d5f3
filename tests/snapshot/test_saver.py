"""Saves by one rank that has the whole state, and by ranks that have their rows of it.

The files of the latter equal those of the former.
"""

import errno
import itertools
import math
import os
import signal
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.faults import FaultyDisk
from support.forks import fork_ranks, results_of
from support.properties import examples
from support.snapshots import TENSORS, file_names, make_manifest, make_saver, make_store, save, write
from torch import Tensor

from mingpt.base.errors import ClaimLost
from mingpt.base.rows import RowMap
from mingpt.distributed import DistributedContext
from mingpt.distributed.exit import is_lost_peer
from mingpt.snapshot import Saver, Status, Store, Tier
from mingpt.snapshot import layout as layout_module
from mingpt.snapshot import saver as saver_module

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


@examples(20)
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
    own, earlier = make_store(tmp_path), [make_store(tmp_path / name) for name in ("a", "b")]
    for store in earlier:
        write(store, make_manifest(4))
    Path(earlier[1].path("notes.txt")).write_text("mine")
    saver = Saver([Tier("memory", own, keep=1, is_durable=False, replaces=[*earlier])])
    with pytest.MonkeyPatch.context() as patch:
        FaultyDisk(patch, "replace", "partial-step_00000005.json")
        save(saver, make_manifest(5))
    assert isinstance(saver.tiers[0].error, OSError)
    assert [store.steps() for store in (*earlier, own)] == [[4], [4], []]
    save(saver, make_manifest(6))
    assert saver.tiers[0].error is None and own.steps() == [6]
    assert not Path(earlier[0].root).exists() and file_names(earlier[1]) == ["notes.txt"]


@pytest.mark.parametrize("broken", ["memory", "disk"])
def test_a_full_tier_keeps_its_snapshots_and_is_tried_again_and_the_other_is_written_all_the_same(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tiers = [
        Tier(name, make_store(tmp_path / name), is_durable=name == "disk") for name in ("memory", "disk")
    ]
    saver, full, seen = Saver(tiers), disk if broken == "disk" else memory, list[list[int]]()
    save(saver, make_manifest(1))
    before = file_names(full.store)
    FaultyDisk(monkeypatch, "fsync", f"/{broken}/snapshots/partial-step_00000002.optimizer")
    saver.save(make_manifest(2), TENSORS, before=lambda: seen.append(memory.store.steps()))
    saver.wait()
    for tier in tiers:
        assert (tier.begun, tier.written) == (2, 1 if tier is full else 2)
        assert isinstance(tier.error, OSError) == (tier is full)
    assert file_names(full.store) == before, "the space of a failed save is free again"
    assert seen == [memory.store.steps()], "memory comes first, and `before` is called once"
    save(saver, make_manifest(3))
    assert [(tier.written, tier.error, tier.store.steps()[0]) for tier in tiers] == [(3, None, 3)] * 2


Tensors = dict[str, Tensor]
TOKENIZER = bytes(range(201))
# What is sharded with DDP, with trainer.shard_optimizer, and with FSDP.
SHARDED: list[tuple[str, ...]] = [(), ("optimizer.",), ("model.", "optimizer.")]
FSDP = SHARDED[-1]


def make_tensors(step: int) -> Tensors:
    """Tensors of several types; one has fewer rows than there are ranks, and one is a scalar."""
    generator = torch.Generator().manual_seed(step)
    return {
        "model.wte": torch.randn(11, 6, generator=generator),
        "model.one_row": torch.randn(1, 50, generator=generator),
        "model.bias": torch.randn(7, generator=generator),
        "model.half": torch.randn(5, 3, generator=generator).bfloat16(),
        "optimizer.wte.step": torch.tensor(float(step)),
        "optimizer.wte.exp_avg": torch.randn(11, 6, generator=generator),
        "optimizer.wte.exp_avg_sq": torch.randn(11, 6, generator=generator),
    }


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_rank_saver(
    context: DistributedContext, folder: Path, writers: Sequence[int], sharded: tuple[str, ...]
) -> Saver:
    """A rank's Saver. Each rank has folders of its own, as if no two nodes shared one."""
    for module in (saver_module, layout_module):
        vars(module)["PIECE_BYTES"] = 100  # so that a tensor travels in several pieces
    rank, shapes = context.rank, {name: tuple(tensor.shape) for name, tensor in make_tensors(1).items()}
    tiers = [
        Tier(name, Store(str(folder / f"{name}-{rank}"), retries_s=()), keep=keep, writers=writers)
        for name, keep in (("memory", 1), ("disk", 3))
    ]
    tiers[0].is_durable = False
    for tier in tiers if rank in writers else ():
        Path(tier.store.root).mkdir(parents=True)
    return Saver(tiers, TOKENIZER, RowMap(shapes, context.world_size, sharded), rank)


def save_own_rows(saver: Saver, step: int, before: Callable[[], None] = lambda: None) -> None:
    """Save `step` to all tiers, and wait. The tensors change while the copies are being written."""
    rows = saver.rows
    own = {}
    for name, tensor in make_tensors(step).items():
        held = rows.of(name, saver.rank)
        own[name] = tensor[held.start : held.stop].clone() if rows.by_rank(name) else tensor.clone()
    saver.save(make_manifest(step), own, before=before)
    for tensor in own.values():
        tensor.zero_()
    saver.wait()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_files_on_each_disk_and_in_each_memory_are_those_of_one_rank_with_the_whole_state(
    workers: int, tmp_path: Path
) -> None:
    writers = sorted({0, workers // 2})

    def work(context: DistributedContext) -> list[tuple[Exception | None, int]]:
        outcomes = []
        for number, sharded in enumerate(SHARDED):
            saver = make_rank_saver(context, tmp_path / str(number), writers, sharded)
            if saver.is_sharded or context.rank in writers:  # as in `Saving.save`
                for step in (3, 7):
                    save_own_rows(saver, step)
                outcomes += [(tier.error, tier.written) for tier in saver.tiers]
        return outcomes

    expected = {}
    for step in (3, 7):
        alone = make_store(tmp_path / f"alone-{step}")
        write(alone, make_manifest(step), make_tensors(step), TOKENIZER)
        expected[step] = files_in(Path(alone.root))
    for outcomes in results_of(workers, work):
        assert set(outcomes) == {(None, 7)}
    for number in range(len(SHARDED)):
        folders = {path.name for path in (tmp_path / str(number)).iterdir()}
        assert folders == {f"{name}-{rank}" for name in ("memory", "disk") for rank in writers}
        for rank in writers:
            assert files_in(tmp_path / str(number) / f"memory-{rank}") == expected[7]
            assert files_in(tmp_path / str(number) / f"disk-{rank}") == expected[3] | expected[7]


class Fault(NamedTuple):
    rank: int
    method: str  # of its store on disk, of its background group, or `before`
    number: int
    act: Callable[..., None]

    def plant(self, places: Sequence[object]) -> None:
        place = next(place for place in places if hasattr(place, self.method))
        real, numbers = getattr(place, self.method), itertools.count(1)

        def call(*arguments: Any) -> Any:
            if next(numbers) == self.number:
                self.act(*arguments)
            return real(*arguments)

        setattr(place, self.method, call)


def fails(error: Exception) -> Callable[..., None]:
    """A method that raises this error; if it writes a file, then in the middle of it."""

    def act(*arguments: Any) -> None:
        for chunks in arguments[1:]:
            next(iter(chunks))
        raise error

    return act


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FULL = fails(OSError(errno.ENOSPC, "No space left on device"))
BROKEN = fails(OSError(errno.EIO, "broken"))
# The kind of the error that a rank knows of.
FINE, FAILED, LOST = "NoneType", "OSError", "lost peer"


@pytest.mark.parametrize(
    ("fault", "results", "whole"),
    [
        # A writer that fails keeps no other writer from its snapshot, and rank 1 learns of the main writer.
        (Fault(0, "write_file", 2, FULL), [FAILED, FAILED, FINE], [2]),
        (Fault(2, "write_file", 2, FULL), [FINE, FINE, FAILED], [0]),
        # Nor does one that fails before or after its files.
        (Fault(0, "begin", 1, BROKEN), [FAILED, FAILED, FINE], [2]),
        (Fault(0, "commit", 1, BROKEN), [FAILED, FINE, FINE], [2]),
        (Fault(0, "before", 1, BROKEN), [FAILED, FAILED, FAILED], []),
        # A rank that is killed is a lost peer and no failed write: only the main thread reports it.
        (Fault(0, "gather_on_all", 2, dies), [None, LOST, LOST], []),
        (Fault(0, "receive", 5, dies), [None, LOST, LOST], []),
        (Fault(1, "send", 2, dies), [LOST, None, LOST], []),
        (Fault(2, "receive", 1, dies), [LOST, LOST, None], []),
    ],
    ids=lambda value: (
        f"{value.method} {value.number} of rank {value.rank}" if isinstance(value, Fault) else ""
    ),
)
def test_after_a_fault_of_one_rank_each_writer_has_a_whole_snapshot_or_none(
    fault: Fault, results: list[str | None], whole: list[int], tmp_path: Path
) -> None:
    assert save_with_fault(fault, [0, 2], tmp_path) == results
    for writer in (0, 2):
        store = Store(str(tmp_path / f"disk-{writer}"))
        if writer in whole:
            assert all(
                torch.equal(store.read(7).read(name), value) for name, value in make_tensors(7).items()
            )
        elif None not in results:
            assert file_names(store) == [], "the space of a failed save is free again"
        assert store.steps() == ([7] if writer in whole else [])


def test_the_files_of_a_writer_that_has_lost_its_claim_stay(tmp_path: Path) -> None:
    """Another job may own the files. The main thread reports the loss."""
    fault = Fault(0, "check_claim", 4, fails(ClaimLost("superseded")))
    assert save_with_fault(fault, [0], tmp_path) == ["ClaimLost"] * 3
    left = file_names(Store(str(tmp_path / "disk-0")))
    assert left == ["partial-step_00000007", "step_00000007.safetensors"]


def save_with_fault(fault: Fault, writers: Sequence[int], folder: Path) -> Sequence[Any]:
    """Save step 7 with FSDP, to disk only, on three ranks; return each rank's error, or None if it died."""

    def work(context: DistributedContext) -> str:
        caller = SimpleNamespace(before=lambda: None)
        saver = make_rank_saver(context, folder, writers, FSDP)
        del saver.tiers[0]
        if context.rank == fault.rank:
            fault.plant([saver.tiers[0].store, saver.group, caller])
        save_own_rows(saver, 7, caller.before)
        error = saver.tiers[0].error
        return LOST if error and is_lost_peer(error) else type(error).__name__

    return fork_ranks(3, work, timeout_s=30)
