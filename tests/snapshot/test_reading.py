"""Rows of tensors; files that cannot be read now, which are not taken for corrupt ones; headers and numbers.

test_store.py tests corrupt snapshots.
"""

import errno
import hashlib
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.single_process import SingleProcess
from support.snapshots import (
    file_names,
    make_manifest,
    make_saver,
    make_store,
    newest,
    open_content,
    save,
    search,
    to_safetensors,
    write,
)

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.base.rows import RowMap
from mingpt.snapshot import Store, open_snapshot, reading
from mingpt.snapshot.reading import MAX_HEADER, accept_all
from mingpt.snapshot.store import verify_file

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
        expected = tensors | {name: tensors[name][own.start : own.stop] for name, own in held.items()}
        parts = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
        state.copy_into(parts, rows, rank, SingleProcess())
        assert all(torch.equal(parts[name], expected[name]) for name in tensors)


@pytest.mark.parametrize("kind", ["json", "safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_the_snapshot_before_an_unreadable_one_is_used_and_nothing_is_renamed(
    store: Store, kind: str, error: Exception, break_reading: Break
) -> None:
    before, failed = file_names(store), break_reading(f"00000002.{kind}", error)
    assert newest(store) == (1, {}) and store.unreadable == {2}
    assert len(failed) == 3, "it is tried again after each pause"
    assert file_names(store) == before


def test_a_file_that_ends_too_soon_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store may close the connection early."""
    remote = Store(f"memory://{uuid.uuid4().hex}/snapshots", retries_s=(0.0,))
    write(remote, make_manifest(1))
    content = remote.files.cat_file(remote.path("step_00000001.json"))
    monkeypatch.setattr(remote.files, "cat_file", Mock(side_effect=[content[:-1], content]))
    assert remote.read_manifest(1).step == 1


def test_whoever_looks_for_a_snapshot_passes_it_over_in_one_line(
    store: Store, break_reading: Break, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    break_reading("00000002")
    assert open_snapshot(store.root).manifest.step == 1
    reason = "its manifest cannot be read: Input/output error"
    assert caplog.messages == [f"snapshot of step 2 in {store.root} skipped: {reason}"]
    with pytest.raises(UserError, match="cannot be used: its manifest cannot be read"):
        open_snapshot(store.path("step_00000002.json"))
    break_reading("step_")
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
    break_reading(f"00000009.{kind}")
    newest(store)
    saver = make_saver(store, keep=1, keep_best=True)
    for step in (3, 4):
        save(saver, make_manifest(step))
    assert store.steps() == [9, 4]


# The header and the numbers of a file

A = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
B = {"dtype": "F32", "shape": [2], "data_offsets": [16, 24]}


def make_file(header: Any, data: bytes = bytes(24)) -> bytes:
    """A safetensors file with this header, as JSON or as bytes."""
    encoded = header if isinstance(header, bytes) else json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + data


def changed(**values: Any) -> bytes:
    """A file in whose header the second tensor is changed."""
    return make_file({"a": A, "b": B | values})


def test_the_tensors_of_a_good_file_are_read() -> None:
    file = open_content(make_file({"a": A, "b": B}))
    assert torch.equal(file.read("a"), torch.zeros(2, 2)) and torch.equal(file.read("b"), torch.zeros(2))


BAD: dict[str, bytes] = {
    "empty": b"",
    "shorter than a length": b"\x01\x02",
    "header past the end": (1000).to_bytes(8, "little") + b"{}",
    "huge header": (2**63).to_bytes(8, "little") + b"{}",
    "header above the limit": make_file(b" " * (MAX_HEADER + 1)),
    "not JSON": make_file(b"not JSON"),
    "deep nesting": make_file(b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"),
    "pickle": b"\x80\x04\x95" + bytes(200),
    "no fields": make_file({"a": A, "b": {}}),
    "more fields": changed(code="import os"),
    "not an object": make_file({"a": A, "b": [1]}),
    "unknown dtype": changed(dtype="F8_E4M3"),
    "negative shape": changed(shape=[-2]),
    "huge shape": changed(shape=[2**62]),
    "shape of floats": changed(shape=[2.0]),
    "negative shape of a fitting size": changed(shape=[-2, -1]),
    "shape of text": changed(shape="2"),
    "no shape": changed(shape=None),
    "type of no text": changed(dtype=[]),
    "spaces": make_file(json.dumps({"a": A, "b": B}).encode()),
    "metadata": make_file({"__metadata__": {"format": "pt"}, "a": A, "b": B}),
    "offsets past the end": changed(shape=[1000], data_offsets=[16, 4016]),
    "offsets backwards": changed(shape=[0], data_offsets=[24, 16]),
    "negative offsets": changed(data_offsets=[-8, 0]),
    "offsets of text": changed(data_offsets=["16", "24"]),
    "overlapping": changed(data_offsets=[8, 16]),
    "gap": changed(shape=[1], data_offsets=[20, 24]),
    "bytes after the last": make_file({"a": A, "b": B}, bytes(30)),
    "bytes that are missing": make_file({"a": A, "b": B}, bytes(20)),
    "no tensors but bytes": make_file({}),
}


@pytest.mark.parametrize("content", BAD.values(), ids=list(BAD))
def test_a_header_that_does_not_describe_its_file_is_corrupt(content: bytes) -> None:
    with pytest.raises(CorruptSnapshot, match=r"\A.{,500}\Z"):
        open_content(content)


def verify(content: bytes) -> None:
    verify_file(open_content(content), hashlib.sha256(content).hexdigest())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
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
