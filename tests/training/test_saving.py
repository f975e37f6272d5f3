"""When and where a run's state is saved, on one rank or on nodes that share no folder."""

import errno
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.forks import SingleProcess
from support.jobs import SMALL
from support.ranks import results_of_threads
from support.snapshots import TENSORS, make_manifest, make_store, write

from mingpt.base.errors import NonRetryableError
from mingpt.base.rows import RowMap
from mingpt.config.cli import build
from mingpt.data import make_corpus
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Found, MemoryFolder, StoredState
from mingpt.snapshot.search import Offer
from mingpt.training.run import compare_environment
from mingpt.training.saving import Saving
from mingpt.training.start import NOT_BEGUN

TEXT = b"To be, or not to be, that is the question.\n" * 40
STEP = 10  # of the states that are saved


def make_saving(
    tmp_path: Path,
    settings: dict[str, Any],
    context: DistributedContext | None = None,
    offers: Sequence[Offer] = (),
    logger: Any = None,
    is_sharded: bool = False,
) -> Saving:
    """The Saving of a run at step STEP. Each of several ranks has a node and a disk of its own.

    `offers` are those of the search, which has found the snapshot of STEP if there are any.
    """
    context = context or SingleProcess()
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
            found=Found(offers[0] if offers else None, "", offers), snapshot_writers=range(context.world_size)
        ),
        keeps_snapshots=True,
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


def save_at(saving: Saving, step: int, is_end: bool = False) -> None:
    saving.state.step = step
    saving.save(is_end=is_end)
    saving.saver.wait()


def test_a_last_snapshot_that_cannot_be_written_ends_the_job_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger: Any = Mock(last={"train": {"step": 1, "train/loss": 1.0}})
    saving = make_saving(tmp_path, {}, logger=logger)
    save_at(saving, 10)
    monkeypatch.setattr(saving.disk.store, "commit", Mock(side_effect=OSError(errno.EIO, "broken")))
    save_at(saving, 20)
    with pytest.raises(NonRetryableError, match="broken") as error:
        saving.finish()
    logger.failed.assert_called_once_with(20, str(error.value))


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


def test_if_one_node_lacks_memory_none_saves_there_and_who_lacks_the_snapshot_of_the_start_gets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a node of its own. Ranks 0 and 2 see the snapshot of the start."""

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=100 if path.parent == tmp_path / "1" else 10**9)

    monkeypatch.setattr("mingpt.snapshot.memory.shutil.disk_usage", usage)
    offers = [Offer(STEP, True, "", rank, 0) for rank in (0, 2)]

    def work(context: DistributedContext) -> tuple[bool, list[int]]:
        folder = tmp_path / str(context.rank)
        folder.mkdir()
        saving = make_saving(folder, {"snapshot.memory_every": 5}, context, offers)
        saving.allocate()
        return saving.memory in saving.saver.tiers, saving.disk.store.steps()

    assert results_of_threads(3, work) == [(False, []), (False, [STEP]), (False, [])]


def test_no_rank_saves_to_memory_after_a_save_there_has_failed_on_another(tmp_path: Path) -> None:
    saving = make_saving(tmp_path, {"snapshot.memory_every": 5, "snapshot.every": 1000})
    saving.allocate()
    save_at(saving, STEP)
    saving.note_counts(0, 0, 1)
    save_at(saving, STEP + 5)
    assert saving.memory.store.steps() == [STEP] and saving.disk.store.steps() == []
    save_at(saving, STEP + 5, is_end=True)
    assert saving.start.memory.stores() == [] and saving.disk.store.steps() == [STEP + 5]


def test_a_resume_from_a_snapshot_of_other_code_is_told_if_the_snapshot_names_its_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    saving = make_saving(tmp_path, {})
    software = saving.manifest().software.model_dump()
    of_older_version = {name: value for name, value in software.items() if name != "code"}
    for then in (software, of_older_version, software | {"code": "ab" * 32}):
        compare_environment(then, saving.environment)
    (line,) = caplog.messages
    assert line.endswith(f"other software or hardware (code: {'ab' * 32} -> {software['code']})")
