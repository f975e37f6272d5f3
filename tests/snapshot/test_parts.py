"""What can happen between the files of one snapshot; test_store.py tests what each file may suffer."""

import errno
import os
from pathlib import Path

import pytest
import torch
from support import snapshots
from support.faults import FaultyDisk
from support.snapshots import PARTS, file_names, make_manifest, make_store, save, write

from mingpt.base.errors import ClaimLost
from mingpt.snapshot import Saver, Store, open_snapshot
from mingpt.snapshot.layout import make_layout, specs_of

NAMES = ["step_00000002.safetensors", "step_00000002.optimizer.safetensors"]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """A store with the snapshots of steps 1 and 2."""
    store = make_store(tmp_path)
    for step in (1, 2):
        write(store, make_manifest(step), PARTS)
    return store


def newest(store: Store) -> tuple[int, list[int]]:
    """The newest valid step, and the corrupt steps; also checks the tensors."""
    step, corrupt = snapshots.newest(store)
    found = store.read(step)
    assert found.entries.keys() == PARTS.keys()
    assert all(torch.equal(found.read(name), tensor) for name, tensor in PARTS.items())
    return step, list(corrupt)


def test_all_files_of_a_step_are_set_aside_and_removed_the_manifest_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.quarantine(2, "for a test")
    assert [name for name in file_names(store) if "00000002" in name] == sorted(
        f"damaged-1-{name}" for name in [*NAMES, "step_00000002.json"]
    )
    assert store.steps() == [1]
    disk = FaultyDisk(monkeypatch, "remove", "safetensors", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        store.remove(1)
    assert store.steps() == [], "its manifest is gone before any other file of it"
    disk.broken = False
    store.remove(1)
    assert not [name for name in file_names(store) if name.startswith("step_")]


@pytest.mark.parametrize(
    "what", [name.replace("00000002", "00000003") for name in (*NAMES, "step_00000002.json")]
)
@pytest.mark.parametrize(("function", "code"), [("fsync", errno.ENOSPC), ("replace", errno.EIO)])
def test_a_disk_that_fails_in_any_file_keeps_nothing_of_the_snapshot(
    what: str, function: str, code: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file_names(store)
    FaultyDisk(monkeypatch, function, f"partial-{what}", code)
    with pytest.raises(OSError, match=os.strerror(code)):
        write(store, make_manifest(3), PARTS)
    assert file_names(store) == before


@pytest.mark.parametrize("written", [[0, 1], [1], []])
def test_a_save_that_was_killed_is_no_snapshot_and_its_files_are_removed_at_the_next_start(
    written: list[int], store: Store
) -> None:
    """This holds whichever files were written."""
    before = file_names(store)
    store.begin(3)
    for number in written:
        layout = make_layout(specs_of(PARTS), 3)[number]
        Path(store.path(layout.name)).write_bytes(layout.header)
    assert newest(store) == (2, []), "it is not set aside"
    store.prepare()
    assert file_names(store) == before


def test_leftovers_of_a_removal_that_was_cut_short_go_with_the_next_save(store: Store) -> None:
    """Leftovers that are newer than the oldest snapshot, which is the best one, are removed, too."""
    write(store, make_manifest(3), PARTS)
    Path(store.path("step_00000002.json")).unlink()
    Path(store.path(NAMES[1])).unlink()
    saver = Saver(store)
    save(saver, make_manifest(4), PARTS)
    assert store.steps() == store.steps("safetensors") == [4, 3, 1]


def test_a_job_that_is_superseded_removes_nothing(store: Store) -> None:
    calls: list[None] = []

    def lose_claim() -> None:
        calls.append(None)
        if len(calls) == 4:
            raise ClaimLost("for a test")

    store.check_claim = lose_claim
    with pytest.raises(ClaimLost):
        write(store, make_manifest(3), PARTS)
    left = [name for name in file_names(store) if "00000003" in name]
    assert left == ["partial-step_00000003", "step_00000003.safetensors"]


def test_weights_alone_are_used_though_the_optimizer_state_is_damaged(store: Store) -> None:
    path = Path(store.path(NAMES[1]))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    snapshot = open_snapshot(store.root, weights_only=True)
    weights = snapshot.tensors("model.")
    assert list(weights) == list("abcde") and torch.equal(weights["b"], PARTS["model.b"])
    assert (snapshot.manifest.step, open_snapshot(store.root).manifest.step) == (2, 1)
