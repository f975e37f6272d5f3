"""When and where a run's state is saved, on one rank or on nodes that share no folder."""

import errno
import platform
import re
import shutil
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.golden import Golden
from support.ranks import results_of_threads
from support.single_process import SingleProcess
from support.small_jobs import SMALL
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.base.errors import NonRetryableError
from mingpt.base.rows import RowMap
from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Found, Manifest, MemoryFolder, Store, StoredState
from mingpt.snapshot.search import Offer
from mingpt.training.saving import Saving
from mingpt.training.start import NOT_BEGUN

TEXT = b"To be, or not to be, that is the question.\n" * 40
TOKEN = "0123456789abcdef" * 2
STEP = 10  # of the states that are saved


def make_saving(
    tmp_path: Path,
    settings: dict[str, Any],
    context: DistributedContext | None = None,
    offers: Sequence[Offer] = (),
    logger: Any = None,
    is_sharded: bool = False,
    keeps_snapshots: bool = True,
    rank: int = 0,
) -> Saving:
    """The Saving of a run at step STEP. Each of several ranks has a node and a disk of its own.

    Without a context there is this rank alone.

    `offers` are those of the search, which has found the snapshot of STEP if there are any.
    """
    if context is None:
        context = SingleProcess()
        context.rank = rank
    config = build(SMALL | {"run_dir": str(tmp_path)} | settings)
    found = StoredState(make_manifest(STEP), None, [], {}, 0, None) if offers else None
    start: Any = SimpleNamespace(
        run_id="0" * 32,
        generation=2,
        store=make_store(tmp_path),
        memory=MemoryFolder(str(tmp_path), "0" * 32, tmp_path),
        durable_step=0,
        step=0,
        snapshot=found,
        manifest=found.manifest if found else NOT_BEGUN,
        plan=SimpleNamespace(
            found=Found(offers[0] if offers else None, "", offers),
            snapshot_writers=range(max(context.world_size, context.rank + 1)),
        ),
        keeps_snapshots=keeps_snapshots,
        corpus=make_corpus(TEXT, config.data),
    )
    state: Any = SimpleNamespace(
        skipped=(0, 0),
        loss_scale=None,
        step=STEP,
        windows_seen=8 * STEP,
        tensors=lambda: TENSORS,
        rows=RowMap({name: tuple(tensor.shape) for name, tensor in TENSORS.items()}),
        strategy=SimpleNamespace(updates_are_sharded=is_sharded, weights_are_sharded=False),
    )
    environment = SingleProcess().environment()
    run: Any = SimpleNamespace(
        config=config, context=context, state=state, start=start, environment=environment
    )
    return Saving(run, logger)


def save_at(saving: Saving, *steps: int, waits: bool = True, is_end: bool = False) -> None:
    """Save the states of these steps; with `waits`, wait until each is written."""
    for step in steps:
        saving.state.step = step
        saving.save(is_end=is_end)
        if waits:
            saving.saver.wait()


@pytest.mark.parametrize(("code", "before"), [(errno.EIO, [10]), (errno.ENOSPC, [])])
def test_a_last_snapshot_that_cannot_be_written_ends_the_job_in_a_sentence(
    code: int, before: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Golden
) -> None:
    logger: Any = Mock(last={"train": {"step": 1, "train/loss": 1.0}})
    saving = make_saving(tmp_path, {}, logger=logger)
    save_at(saving, *before)
    monkeypatch.setattr(saving.disk.store, "commit", Mock(side_effect=OSError(code, "broken")))
    save_at(saving, 20)
    with pytest.raises(NonRetryableError) as error:
        saving.finish()
    golden(str(error.value))
    logger.failed.assert_called_once_with(20, str(error.value))


@pytest.mark.parametrize(("is_keeper", "left"), [(True, [10]), (False, [10, 20])])
def test_one_rank_per_folder_sets_snapshots_aside_even_if_all_ranks_write_there(
    is_keeper: bool, left: list[int], tmp_path: Path
) -> None:
    """Each node sets aside those in its own memory."""
    saving = make_saving(tmp_path, {"snapshot.memory_every": 1000}, keeps_snapshots=is_keeper)
    saving.allocate()
    save_at(saving, 10, 20)
    write(saving.memory.store, make_manifest(20))
    assert saving.set_aside_after(10) == left[-1]
    assert sorted(saving.disk.store.steps()) == left
    assert saving.memory.store.steps() == []
    assert "suspect-1-step_00000020.json" in saving.memory.store.names()


def test_waiting_long_for_the_write_before_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mingpt.training.saving.LONG_WAIT_S", -1.0)
    saving = make_saving(tmp_path, {})
    save_at(saving, 10, 15, 20, 25, waits=False)
    saving.finish()
    (line,) = caplog.messages
    expected = r"training waited \d+\.\d s until the snapshot of step 10 was written: raise snapshot\."
    assert re.match(expected, line)


@pytest.mark.parametrize(("local_every", "expected"), [(None, [5, 10, 15, 18]), (0, [18]), (10, [10, 18])])
def test_a_node_with_a_disk_of_its_own_keeps_snapshots_there(
    local_every: int | None, expected: list[int], tmp_path: Path
) -> None:
    """The node's first worker, which is not rank 0, saves them; the last one is always kept."""
    saving = make_saving(tmp_path, {"snapshot.local_every": local_every}, rank=1)
    save_at(saving, 5, 10, 15)
    save_at(saving, 18, is_end=True)
    assert sorted(saving.disk.store.steps()) == expected
    assert saving.counts[0] == 0, "what counts for the job is on rank 0's disk"
    assert not saving.is_missing()
    saving.state.step = 19
    assert saving.is_missing()


def test_nobody_waits_for_the_slow_disk_of_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node leaves out its own copies meanwhile, but not the last one."""
    saving = make_saving(tmp_path, {}, rank=1)
    write, may_go_on = saving.disk.store.commit, threading.Event()

    def slow_write(manifest: Manifest) -> None:
        assert may_go_on.wait(30)
        write(manifest)

    monkeypatch.setattr(saving.disk.store, "commit", slow_write)
    for step in (5, 10, 15):
        saving.durable_step = step
        save_at(saving, step, waits=False)
    may_go_on.set()
    save_at(saving, 18, is_end=True)
    assert sorted(saving.disk.store.steps()) == [5, 18]


def test_a_new_best_is_one_below_all_that_are_kept(tmp_path: Path) -> None:
    """Snapshots of later steps do not count: the run does not go on from them. Without keep_best, none is."""
    store = make_store(tmp_path)
    for step, loss in ((5, 3.0), (10, 4.0), (15, 1.0)):
        write(store, make_manifest(step, loss))
    saving = make_saving(tmp_path, {"snapshot.keep_best": True})
    assert [saving.is_new_best(loss) for loss in (3.0, 2.5, 2.75, 2.0)] == [False, True, False, True]
    assert not make_saving(tmp_path, {}).is_new_best(0.5)


@pytest.mark.parametrize(("is_sharded", "expected"), [(False, [0, 1, 2]), (True, [0, 1])])
def test_without_a_shared_folder_every_node_writes_the_state_or_two_do_if_it_is_sharded(
    is_sharded: bool, expected: list[int], tmp_path: Path
) -> None:
    def work(context: DistributedContext) -> tuple[list[int], list[int]]:
        saving = make_saving(tmp_path / str(context.rank), {}, context, is_sharded=is_sharded)
        return list(saving.disk.writers), list(saving.memory.writers)

    assert results_of_threads(3, work) == [(expected, expected)] * 3


NOWHERE: tuple[list[int], list[int]] = ([], [])


def after_allocate(
    tmp_path: Path, memory_every: int, offers: Sequence[Offer], holders: Sequence[int] = ()
) -> list[tuple[list[int], list[int]]]:
    """The steps in memory and on disk that three nodes have after `Saving.allocate`; they share no folder.

    The memory of the ranks `holders` has the snapshot of STEP before, from an earlier generation.
    """

    def work(context: DistributedContext) -> tuple[list[int], list[int]]:
        folder = tmp_path / str(context.rank)
        folder.mkdir()
        saving = make_saving(folder, {"snapshot.memory_every": memory_every}, context, offers)
        memory = saving.start.memory
        if context.rank in holders:
            memory.root.mkdir(mode=0o700)
            write(Store(str(memory.root / TOKEN)), make_manifest(STEP))
        saving.allocate()
        in_memory = {step for store in memory.stores() for step in store.steps()}
        return sorted(in_memory), saving.disk.store.steps()

    return results_of_threads(3, work)


def in_memory_of(*ranks: int) -> list[Offer]:
    """The offers of ranks that see the snapshot of STEP in their nodes' memory."""
    return [Offer(STEP, False, "", rank, 1) for rank in ranks]


ONE_LACKS = [Offer(STEP, True, "", 0, 0), *in_memory_of(2), Offer(STEP, True, "", 1, 0, None, "bad")]


@pytest.mark.parametrize(
    ("memory_every", "offers", "got"),
    [
        (5, ONE_LACKS, ([STEP], [])),
        (0, ONE_LACKS, ([], [STEP])),
        (5, in_memory_of(0, 1, 2), NOWHERE),
        (5, [], NOWHERE),
    ],
    ids=["to memory", "to disk", "all have it", "a fresh run"],
)
def test_only_a_writer_without_the_snapshot_of_the_start_gets_it_before_the_first_step(
    memory_every: int, offers: list[Offer], got: tuple[list[int], list[int]], tmp_path: Path
) -> None:
    assert after_allocate(tmp_path, memory_every, offers) == [NOWHERE, got, NOWHERE]


def test_a_node_with_too_little_memory_ends_snapshots_in_memory_for_all_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, golden: Golden
) -> None:
    """The memory of two nodes keeps the snapshot until a newer one is on disk; the third node gets it."""
    disk_usage = shutil.disk_usage

    def usage(path: Path) -> Any:
        is_small = path.parent == tmp_path / "1"
        return SimpleNamespace(free=100) if is_small else disk_usage(path)

    monkeypatch.setattr("mingpt.snapshot.memory.shutil.disk_usage", usage)
    found = after_allocate(tmp_path, 5, in_memory_of(0, 2), holders=[0, 2])
    assert found == [([STEP], []), ([], [STEP]), ([STEP], [])]
    (line,) = caplog.messages
    golden(line.replace(platform.node(), "HOST"))


def test_no_rank_saves_to_memory_after_a_save_there_has_failed_on_another(tmp_path: Path) -> None:
    saving = make_saving(tmp_path, {"snapshot.memory_every": 5, "snapshot.every": 1000})
    saving.allocate()
    save_at(saving, STEP)
    saving.note_counts(0, 0, 1)
    save_at(saving, STEP + 5)
    assert saving.memory.store.steps() == [STEP] and saving.disk.store.steps() == []
    save_at(saving, STEP + 5, is_end=True)
    assert saving.start.memory.stores() == [] and saving.disk.store.steps() == [STEP + 5]
