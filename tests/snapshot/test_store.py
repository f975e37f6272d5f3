import contextlib
import errno
import json
import os
import uuid
from collections.abc import Callable
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
from support.faults import FaultyDisk
from support.snapshots import file_names, make_manifest, make_store, newest, write

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.snapshot import Store, open_snapshot
from mingpt.snapshot.layout import step_of, unfinished_name

KINDS = ["json", "safetensors", "optimizer.safetensors"]  # endings of a snapshot's three files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


@pytest.mark.parametrize(("kind", "stride"), [("json", 57), ("safetensors", 9), ("optimizer.safetensors", 1)])
def test_every_flipped_bit_and_every_cut_is_noticed_and_the_snapshot_before_is_used(
    store: Store, kind: str, stride: int
) -> None:
    """One bit is flipped at a time, in every byte or every seventh, and the file is cut there."""
    for step in (1, 2):
        write(store, make_manifest(step))
    path = Path(store.path(f"step_00000002.{kind}"))
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, stride):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        with pytest.raises(CorruptSnapshot):
            store.read(2)
    for length in range(0, len(whole), max(1, stride // 8)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptSnapshot):
            store.open(2)  # before any weights are read
    assert newest(store)[0] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [lambda path: None, os.mkfifo], ids=["nothing", "FIFO"])
def test_a_snapshot_with_another_thing_in_place_of_a_file_is_quarantined_by_name(
    make: Callable[[Path], None], kind: str, store: Store
) -> None:
    """Reading it does not hang. A second corrupt snapshot of the same step does not overwrite the first."""
    write(store, make_manifest(1))
    for attempt in (1, 2):
        write(store, make_manifest(2))
        path = Path(store.path(f"step_00000002.{kind}"))
        path.unlink()
        make(path)
        store.prepare()
        step, corrupt = newest(store)
        assert (step, list(corrupt)) == (1, [2])
        store.quarantine(2, corrupt[2])
        aside = {f"damaged-{attempt}-step_00000002.{other}" for other in KINDS if other != kind}
        assert aside <= set(file_names(store))
    assert store.steps() == store.steps("safetensors") == [1]


def test_at_the_start_only_what_a_killed_job_left_is_removed(store: Store) -> None:
    ours = ["partial-step_00000003", "partial-step_00000003.json", "partial-partial-step_00000003"]
    ours += ["step_00000003.safetensors", f"partial-probe-{32 * '0'}"]
    users = ["partial-results.csv", "partial-step_3.json", "probe-1", f"probe-{os.getpid()}", "step_x"]
    for name in ours + users:
        Path(store.path(name)).write_text("mine")
    Path(store.path("partial-x")).mkdir()
    store.prepare()
    assert file_names(store) == sorted([*users, "partial-x"])


def test_an_upload_that_is_truncated_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"memory://{uuid.uuid4().hex}/snapshots", retries_s=(0.0,))
    monkeypatch.setattr(store.files, "put_file", lambda _, path: store.files.pipe_file(path, b"conten"))
    with pytest.raises(OSError, match="has 6 bytes of 7 after writing"):
        store.write_atomic("step_00000001.json", b"content")


def test_a_snapshot_is_found_from_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    store = make_store(tmp_path / "run")
    write(store, make_manifest(7))
    for where in (
        tmp_path / "run",
        store.root,
        store.path("step_00000007.safetensors"),
        store.path("step_00000007.json"),
        f"file://{tmp_path}/run/",
    ):
        assert open_snapshot(str(where)).manifest.step == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(json.dumps({"snapshot": {"path": store.root}}))
    assert open_snapshot(str(tmp_path / "other")).manifest.step == 7


def test_the_best_snapshot_has_the_lowest_validation_loss_of_its_own_step(store: Store) -> None:
    write(store, make_manifest(5))
    with pytest.raises(UserError, match="there is no best snapshot in"):
        open_snapshot(store.root, best=True)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        write(store, make_manifest(step, loss))
    assert open_snapshot(f"{store.root}@best").manifest.step == 2
    Path(store.path("step_00000002.safetensors")).write_bytes(b"damaged")
    assert open_snapshot(store.root, best=True).manifest.step == 1


def test_the_manifest_of_a_snapshot_becomes_a_mark_of_files_to_remove(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, make_manifest(1))
    disk = FaultyDisk(monkeypatch, "remove", "safetensors", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        store.remove(1)
    assert store.steps() == [] and file_names(store)[0] == unfinished_name(1)
    assert len(file_names(store)) == 3
    disk.broken = False
    write(store, make_manifest(2))
    store.prune(1, False, None)
    assert {step_of(name) for name in file_names(store)} == {2}


def test_a_users_file_with_the_name_of_a_snapshots_stays(store: Store) -> None:
    own = Path(store.path("step_00000002.safetensors"))
    write(store, make_manifest(1))
    own.write_bytes(b"exported")
    for step in (3, 4, 5):
        write(store, make_manifest(step))
        store.prune(1, False, None)
    assert store.steps() == [5] and own.read_bytes() == b"exported"


def test_a_manifest_that_cannot_be_seen_is_not_taken_for_a_missing_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save is refused, and nothing is removed: the snapshot is valid when the disk works again."""
    write(store, make_manifest(1))
    Path(store.path(unfinished_name(1))).touch()
    names = file_names(store)
    disk = FaultyDisk(monkeypatch, "stat", "step_00000001.json", errno.EIO)
    with pytest.raises(UserError, match="cannot be written to: Input/output error"):
        store.prepare()
    with pytest.raises(OSError, match="Input/output error"):
        store.begin(1)
    store.discard(1)
    assert file_names(store) == names and disk.hits == 3
    disk.broken = False
    store.prepare()
    assert newest(store)[0] == 1


@pytest.mark.parametrize("failures", [1, 2])
def test_an_upload_that_breaks_off_is_repeated_once_and_otherwise_leaves_nothing(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A weekly job saves to a server of S3."""
    store = Store(f"memory://{uuid.uuid4().hex}/snapshots", retries_s=(0.0,))
    outcomes = [*failures * [OSError("connection lost")], *9 * [DEFAULT]]
    monkeypatch.setattr(store, "upload", Mock(wraps=store.upload, side_effect=outcomes))
    with pytest.raises(OSError, match="connection lost") if failures > 1 else contextlib.nullcontext():
        write(store, make_manifest(1))
    assert store.names() == ([] if failures > 1 else [f"step_00000001.{kind}" for kind in sorted(KINDS)])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_folder_that_cannot_be_written_is_refused_at_the_start_but_a_full_one_may_have_room_later(
    code: int, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyDisk(monkeypatch, "replace", "partial-probe", code)
    with contextlib.nullcontext() if code == errno.ENOSPC else pytest.raises(UserError, match="written to"):
        store.prepare()
    assert file_names(store) == []
