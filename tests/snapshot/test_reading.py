"""Rows of tensors, and files that cannot be read now, which are not taken for corrupt ones.

test_store.py tests corrupt files.
"""

import errno
import itertools
import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshots import (
    TENSORS,
    file_names,
    make_manifest,
    make_saver,
    make_store,
    newest,
    open_content,
    save,
    to_safetensors,
    write,
)

from mingpt.base.errors import UserError
from mingpt.snapshot import Store, open_snapshot, reading

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_any_range_of_rows_is_read_and_no_other_byte(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = {
        "a": torch.arange(5, dtype=dtype),
        "b": torch.arange(84, dtype=dtype).view(7, 3, 4),
        "c": torch.arange(6, dtype=dtype).view(6, 1),
        "scalar": torch.tensor(3, dtype=dtype),
    }
    file, counts = open_content(to_safetensors(tensors)), list[int]()
    whole = reading.read_range

    def read_range(files: Any, path: str, begin: int, buffer: memoryview) -> None:
        counts.append(len(buffer))
        whole(files, path, begin, buffer)

    monkeypatch.setattr(reading, "read_range", read_range)
    monkeypatch.setattr(reading, "PIECE_BYTES", 40)
    for name, tensor in tensors.items():
        rows = len(tensor) if tensor.ndim else 0
        for begin, end in itertools.combinations(range(rows + 1), 2):
            counts.clear()
            assert torch.equal(file.read(name, range(begin, end)), tensor[begin:end])
            assert sum(counts) == tensor[begin:end].nbytes and max(counts) <= 40
        assert torch.equal(file.read(name), tensor)
    assert file.read("b", range(2, 2)).shape == (0, 3, 4)


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_snapshot_before_an_unreadable_one_is_used_and_nothing_is_renamed(
    store: Store, kind: str, error: Exception, break_reading: Break
) -> None:
    before = file_names(store)
    failed = break_reading(f"00000002.{kind}", error)
    assert newest(store) == (1, {})
    assert list(store.unreadable) == [2]
    assert "cannot be read: " in store.unreadable[2]
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
