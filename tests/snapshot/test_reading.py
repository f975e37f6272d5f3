"""Rows of tensors, and files that cannot be read now, which are not taken for corrupt ones.

test_store.py tests corrupt files.
"""

import errno
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.single_process import SingleProcess
from support.snapshots import (
    TENSORS,
    file_names,
    make_manifest,
    make_saver,
    make_store,
    newest,
    save,
    search,
    write,
)

from mingpt.base.errors import UserError
from mingpt.base.rows import RowMap
from mingpt.snapshot import Store, open_snapshot, reading
from mingpt.snapshot.reading import accept_all

FAILURES = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
    PermissionError(errno.EACCES, "Permission denied"),
    TimeoutError("the object store is silent"),
    ConnectionError("reset"),
    RuntimeError("whatever a driver raises"),
]
Break = Callable[..., list[str]]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the snapshots of steps 1 and 2."""
    store = make_store(tmp_path)
    for step in (1, 2):
        write(store, make_manifest(step))
    return store


@pytest.fixture
def break_reading(monkeypatch: pytest.MonkeyPatch) -> Break:
    """Let reads of files whose names contain `name` raise `error`, `times` times; returns failed paths."""
    whole = reading.read_range

    def arm(name: str, error: Exception, times: int = 1_000_000) -> list[str]:
        failed: list[str] = []

        def read_range(files: Any, path: str, begin: int, buffer: memoryview) -> None:
            if name in path and len(failed) < times:
                failed.append(path)
                raise error
            whole(files, path, begin, buffer)

        monkeypatch.setattr(reading, "read_range", read_range)
        return failed

    return arm


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("sharded", [(), ("optimizer.",), ("model.", "optimizer.")])
def test_each_rank_reads_its_rows_whatever_the_pieces_that_are_sent(
    sharded: tuple[str, ...], workers: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece may begin or end within a row, and hold several tensors. Some ranks have no row of a tensor."""
    tensors = {
        "model.bias": torch.randn(5),
        "model.weight": torch.randn(7, 3, 4),
        "model.one_row": torch.randn(1, 50),
        "optimizer.step": torch.tensor(3.0),
        "optimizer.weight": torch.randn(7, 3, 4),
    }
    write(store, make_manifest(3), tensors)
    monkeypatch.setattr("mingpt.snapshot.search.PIECE_BYTES", 40)
    _, state = search([store], SingleProcess(), accept_all)
    assert state
    rows = RowMap({name: tuple(tensor.shape) for name, tensor in tensors.items()}, workers, sharded)
    for rank in range(workers):
        held = {name: rows.of(name, rank) for name in tensors if rows.by_rank(name)}
        own = {name: tensors[name][there.start : there.stop] for name, there in held.items()}
        expected = tensors | own
        parts = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        state.copy_into(parts, rows, rank, SingleProcess())
        assert all(torch.equal(parts[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_snapshot_before_an_unreadable_one_is_used_and_nothing_is_renamed(
    store: Store, kind: str, error: Exception, break_reading: Break
) -> None:
    before = file_names(store)
    failed = break_reading(f"00000002.{kind}", error)
    assert newest(store) == (1, {})
    assert store.unreadable == {2}
    assert len(failed) == 3, "it is tried again after each pause"
    assert file_names(store) == before


def test_a_file_that_ends_too_soon_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store may close the connection early."""
    remote = Store(f"memory://{random.random()}/snapshots", retries_s=(0.0,))
    write(remote, make_manifest(1))
    whole, cut = remote.files.cat_file, iter([True])

    def cat_file(path: str, **options: Any) -> bytes:
        content: bytes = whole(path, **options)
        return content[:-1] if path.endswith("safetensors") and next(cut, False) else content

    monkeypatch.setattr(remote.files, "cat_file", cat_file)
    assert all(torch.equal(remote.read(1).read(name), tensor) for name, tensor in TENSORS.items())


def test_whoever_looks_for_a_snapshot_passes_it_over_in_one_line(
    store: Store, break_reading: Break, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("time.sleep", lambda _: None)
    break_reading("00000002", FAILURES[0])
    assert open_snapshot(store.root).manifest.step == 1
    reason = "its manifest cannot be read: Input/output error"
    assert caplog.messages == [f"snapshot of step 2 in {store.root} skipped: {reason}"]
    with pytest.raises(UserError, match="cannot be used: its manifest cannot be read"):
        open_snapshot(store.path("step_00000002.json"))
    break_reading("step_", FAILURES[0])
    with pytest.raises(
        UserError, match=f"no snapshot in {store.root} can be used .step 2: {reason}; step 1: "
    ):
        open_snapshot(store.root)


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
def test_an_unreadable_snapshot_is_never_pruned_and_does_not_count(
    store: Store, kind: str, break_reading: Break
) -> None:
    """The snapshot is newer than the one that training goes on from, and keep_last is 1."""
    write(store, make_manifest(9))
    break_reading(f"00000009.{kind}", FAILURES[0])
    newest(store)
    saver = make_saver(store, keep=1, keep_best=True)
    for step in (3, 4):
        save(saver, make_manifest(step))
    assert store.steps() == [9, 4]
