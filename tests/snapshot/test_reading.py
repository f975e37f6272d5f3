"""Files that cannot be read now, which are not taken for corrupt ones; numbers that are not finite.

test_store.py tests corrupt snapshots.
"""

import errno
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.snapshots import (
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

from mingpt.base.errors import CorruptSnapshot
from mingpt.snapshot import Store, reading
from mingpt.snapshot.store import verify_file

FAILURES = [
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.ESTALE, "Stale file handle"),
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
    """Let reads of files whose names contain `name` raise `error`; returns the paths that were tried."""
    whole, failed = reading.read_range, list[str]()

    def arm(name: str, error: Exception = FAILURES[0]) -> list[str]:
        def read_range(files: Any, path: str, begin: int, buffer: memoryview) -> None:
            if name in path:
                failed.append(path)
                raise error
            whole(files, path, begin, buffer)

        monkeypatch.setattr(reading, "read_range", read_range)
        return failed

    return arm


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_snapshot_before_an_unreadable_one_is_used_and_nothing_is_renamed(
    store: Store, kind: str, error: Exception, break_reading: Break
) -> None:
    before, failed = file_names(store), break_reading(f"00000002.{kind}", error)
    assert newest(store) == (1, {}) and store.unreadable == {2}
    assert len(failed) == 3, "it is tried again after each pause"
    assert file_names(store) == before


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
def test_an_unreadable_snapshot_is_never_pruned_and_does_not_count(
    store: Store, kind: str, break_reading: Break
) -> None:
    """The snapshot is newer than the one that training goes on from, and keep_last is 1."""
    write(store, make_manifest(9))
    break_reading(f"00000009.{kind}")
    newest(store)
    saver = make_saver(store, keep=1, keep_best=True)
    for step in (3, 4):
        save(saver, make_manifest(step))
    assert store.steps() == [9, 4]


def verify(content: bytes) -> None:
    verify_file(open_content(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("piece_bytes", [104, 1 << 20])
def test_a_single_number_that_is_not_finite_is_found(
    dtype: torch.dtype, number: float, piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingpt.snapshot.store.PIECE_BYTES", piece_bytes)
    tensor = torch.randn(7, 11).to(dtype)
    verify(to_safetensors({"model.a": tensor, "model.b": torch.arange(5)}))
    for place in (0, 38, 76):
        damaged = tensor.clone()
        damaged.view(-1)[place] = number
        with pytest.raises(CorruptSnapshot, match=r"model\.a.*not finite"):
            verify(to_safetensors({"model.a": damaged}))
