import errno
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from conftest import SMALL
from support.single_process import SingleProcess
from support.snapshots import TENSORS, make_manifest, make_store, save

from mingpt.base.errors import NonRetryableError
from mingpt.base.rows import RowMap
from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.snapshot import Manifest, MemorySnapshots, Saver
from mingpt.snapshot.search import View
from mingpt.training.run_folder import RunFolder
from mingpt.training.saving import Saving
from mingpt.training.start import NOT_BEGUN

TEXT = b"To be, or not to be, that is the question.\n" * 40


@pytest.fixture
def logger() -> Any:
    return Mock(last={"train": {"step": 1, "train/loss": 1.0}})


@pytest.fixture
def saving(tmp_path: Path, logger: Any) -> Saving:
    return make_saving(tmp_path, {}, logger=logger)


def make_saving(
    tmp_path: Path, settings: dict[str, Any], rank: int = 0, is_on_one_disk: bool = False, logger: Any = None
) -> Saving:
    """The Saving of a run at step 10 that has no snapshot yet, perhaps on one of several nodes."""
    config = build(SMALL | {"run_dir": str(tmp_path)} | settings)
    folder = RunFolder(tmp_path, True, True, is_shared=True, snapshots_are_shared=not is_on_one_disk)
    start: Any = SimpleNamespace(
        run_id="id",
        store=make_store(tmp_path),
        memory=MemorySnapshots(str(tmp_path), "id", tmp_path),
        durable_step=0,
        step=0,
        manifest=NOT_BEGUN,
        known=SimpleNamespace(discarded_after=[], token="0123456789abcdef" * 2),
        found=SimpleNamespace(views=[View()] * (rank + 1)),
        folder=folder,
        corpus=make_corpus(TEXT, config.data),
    )
    state: Any = SimpleNamespace(
        skipped=(0, 0),
        loss_scale=None,
        step=10,
        windows_seen=80,
        tensors=lambda: TENSORS,
        rows=RowMap({name: tuple(tensor.shape) for name, tensor in TENSORS.items()}),
        strategy=SimpleNamespace(updates_are_sharded=is_on_one_disk, weights_are_sharded=False),
    )
    context = SingleProcess()
    context.rank = rank
    run: Any = SimpleNamespace(
        config=config, context=context, state=state, start=start, environment=context.environment()
    )
    return Saving(run, logger)


def fail_from(saving: Saving, step: int, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make snapshots from this step on fail to be written."""
    write = saving.store.commit

    def faulty_write(manifest: Manifest) -> None:
        if manifest.step >= step:
            raise error
        write(manifest)

    monkeypatch.setattr(saving.store, "commit", faulty_write)


@pytest.mark.parametrize(
    ("code", "first", "expected"),
    [
        (
            errno.EIO,
            20,
            "the run stands at step 10 there: make room or repair it, and start the same command again, "
            "which goes on from there",
        ),
        (
            errno.ENOSPC,
            0,
            "there is none before it: make room or repair it, and start the same command again",
        ),
    ],
)
def test_a_last_snapshot_that_cannot_be_written_ends_the_job_in_a_sentence(
    code: int, first: int, expected: str, saving: Saving, logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_from(saving, first, OSError(code, "broken"), monkeypatch)
    for step in (10, 20):
        saving.state.step = step
        saving.save_to_disk()
    with pytest.raises(NonRetryableError) as error:
        saving.finish()
    assert str(error.value) == (
        f"the snapshot of step 20 cannot be written to {saving.store.url} (broken) and {expected}"
    )
    logger.failed.assert_called_once_with(20, str(error.value))


def test_a_failure_in_between_is_forgotten_when_the_last_one_is_written(
    saving: Saving, logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_from(saving, 0, OSError(errno.EIO, "broken"), patch)
        saving.save_to_disk()
        saving.wait()
    saving.state.step = 20
    saving.save_to_disk()
    saving.finish()
    assert saving.store.steps() == [20]


@pytest.mark.parametrize(("is_keeper", "left"), [(True, [10]), (False, [10, 20])])
def test_one_rank_per_folder_sets_snapshots_aside_even_if_all_ranks_write_there(
    is_keeper: bool, left: list[int], saving: Saving, logger: Any
) -> None:
    for step in (10, 20):
        saving.state.step = step
        saving.save_to_disk()
    saving.folder = replace(saving.folder, keeps_snapshots=is_keeper)
    saving.discard_after(10)
    assert sorted(saving.store.steps()) == left


def test_waiting_long_for_the_write_before_is_said_once(
    saving: Saving, logger: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mingpt.training.saving.LONG_WAIT_S", -1.0)
    for step in (10, 15, 20, 25):
        saving.state.step = step
        saving.save_to_disk()
    saving.finish()
    (line,) = caplog.messages
    expected = r"training waited \d+\.\d s until the snapshot of step 10 was written: raise snapshot\."
    assert re.match(expected, line)


def test_what_one_node_has_on_disk_is_in_memory_before_and_until_no_generation_may_follow(
    tmp_path: Path, logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment that node may be lost, and the job goes on from the other nodes' memory."""
    saving = make_saving(tmp_path, {}, is_on_one_disk=True)
    memory = saving.memory.own.store
    commit_to_memory, commit_to_disk, in_memory = memory.commit, saving.store.commit, list[list[int]]()

    def steps_in_memory() -> list[int]:
        return sorted(
            {step for store in saving.memory.snapshots.stores() for step in store.steps()}, reverse=True
        )

    def slow_commit(manifest: Manifest) -> None:
        time.sleep(0.2)
        commit_to_memory(manifest)

    def noted_commit(manifest: Manifest) -> None:
        in_memory.append(steps_in_memory())
        commit_to_disk(manifest)

    monkeypatch.setattr(memory, "commit", slow_commit)
    monkeypatch.setattr(saving.store, "commit", noted_commit)
    for step in (10, 13):
        saving.state.step = step
        saving.save_to_memory()
        saving.save_to_disk(is_last=step == 13)
        saving.finish()
    assert in_memory == [[10], [13, 10]]
    saving.release_memory("SIGTERM")
    assert steps_in_memory() == [13, 10]
    saving.release_memory("STOP")
    assert steps_in_memory() == [] and saving.store.steps() == [13, 10]


@pytest.mark.parametrize(("is_on_one_disk", "expected"), [(False, [2, 6]), (True, [1, 2, 4, 5, 6])])
def test_what_is_on_one_nodes_disk_is_also_saved_to_memory_and_so_is_a_generations_first_step(
    is_on_one_disk: bool, expected: list[int], tmp_path: Path
) -> None:
    saving = make_saving(tmp_path, {"snapshot.memory_every": 2}, is_on_one_disk=is_on_one_disk)
    due = []
    for saving.state.step in range(1, 8):
        if saving.is_due_in_memory(is_on_disk=saving.state.step in (4, 5)):
            due.append(saving.state.step)
            saving.save_to_memory()
    assert due == expected


@pytest.mark.parametrize(("local_every", "expected"), [(None, [5, 10, 15, 18]), (0, [18]), (10, [10, 18])])
def test_a_node_with_a_disk_of_its_own_keeps_snapshots_there(
    local_every: int | None, expected: list[int], tmp_path: Path
) -> None:
    """The node's first worker, which is not rank 0, saves them; the last one is always kept."""
    saving = make_saving(tmp_path, {"snapshot.local_every": local_every}, rank=1)
    for step in (5, 10, 15, 18):
        saving.state.step = step
        saving.save_to_disk(is_last=step == 18)
        saving.wait()
    assert sorted(saving.store.steps()) == expected
    assert saving.newest_written == 0, "what counts for the job is on rank 0's disk"
    assert not saving.is_missing()
    saving.save_to_disk(is_last=True)
    saving.state.step = 19
    assert saving.is_missing()


def test_nobody_waits_for_the_slow_disk_of_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node leaves out its own copies meanwhile, but not the last one."""
    saving = make_saving(tmp_path, {}, rank=1)
    write, may_go_on = saving.store.commit, threading.Event()

    def slow_write(manifest: Manifest) -> None:
        assert may_go_on.wait(30)
        write(manifest)

    monkeypatch.setattr(saving.store, "commit", slow_write)
    for step in (5, 10, 15):
        saving.state.step = saving.durable_step = step
        saving.save_to_disk()
    may_go_on.set()
    saving.state.step = 18
    saving.save_to_disk(is_last=True)
    saving.finish()
    assert sorted(saving.store.steps()) == [5, 18]


def test_a_new_best_is_one_below_all_that_are_kept(tmp_path: Path) -> None:
    """Snapshots of later steps do not count: the run does not go on from them. Without keep_best, none is."""
    kept = Saver(make_store(tmp_path))
    for step, loss in ((5, 3.0), (10, 4.0), (15, 1.0)):
        save(kept, make_manifest(step, loss))
    saving = make_saving(tmp_path, {"snapshot.keep_best": True})
    assert [saving.is_new_best(loss) for loss in (3.0, 2.5, 2.75, 2.0)] == [False, True, False, True]
    assert not make_saving(tmp_path, {}).is_new_best(0.5)
