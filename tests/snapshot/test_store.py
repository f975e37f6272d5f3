import errno
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.faults import FaultyDisk
from support.object_store import object_store
from support.snapshots import TENSORS, file_names, make_manifest, make_store, newest, write

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.snapshot import Store, open_snapshot

KINDS = ["json", "safetensors", "optimizer.safetensors"]  # endings of a snapshot's three files


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path)


@pytest.mark.parametrize(("kind", "stride"), [("json", 57), ("safetensors", 9), ("optimizer.safetensors", 1)])
def test_every_flipped_bit_and_every_cut_is_noticed_and_the_snapshot_before_is_used(
    store: Store, kind: str, stride: int
) -> None:
    """One bit is flipped at a time, in every byte or every seventh, and the file is cut there."""
    write(store, make_manifest(1))
    write(store, make_manifest(2))
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
            store.read(2)
    step, corrupt = newest(store)
    assert (step, list(corrupt)) == (1, [2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to(path),
        lambda path: path.symlink_to(path.parent / "nowhere"),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["nothing", "FIFO", "folder", "loop", "link to nothing", "link to a device"],
)
def test_a_snapshot_with_another_thing_in_place_of_a_file_is_quarantined_by_name(
    make: Callable[[Path], None], kind: str, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading it does not hang. A second corrupt snapshot of the same step does not overwrite the first."""
    caplog.set_level(logging.WARNING)
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
        target = store.path(f"damaged-{attempt}-step_00000002.")
        assert f"snapshot of step 2 set aside as {target}" in caplog.text
    assert len([name for name in file_names(store) if name.startswith("damaged-")]) >= 4
    assert store.steps() == store.steps("safetensors") == [1]


def test_a_place_that_cannot_be_written_or_has_no_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        Store(str(tmp_path / "file" / "snapshots")).prepare()
    with pytest.raises(UserError, match="s4"):
        Store("s4://bucket/snapshots")


def test_a_refused_start_leaves_no_file_and_a_dangling_link_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(UserError, match="is a link to nowhere, which is not a folder"):
        Store(str(tmp_path / "link")).prepare()
    monkeypatch.setattr("mingpt.base.files.fsync_path", Mock(side_effect=OSError(errno.EIO, "broken")))
    with pytest.raises(UserError, match="cannot be written to: broken"):
        Store(str(tmp_path / "new")).prepare()
    assert not any((tmp_path / "new").iterdir())


def test_a_listing_that_fails_once_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path), retries_s=(0.0,))
    (tmp_path / "step_00000001.json").touch()
    errors = iter([OSError(errno.ETIMEDOUT, "timed out")])
    list_files = store.files.ls

    def fail_once(*arguments: Any, **named: Any) -> Any:
        for error in errors:
            raise error
        return list_files(*arguments, **named)

    monkeypatch.setattr(store.files, "ls", fail_once)
    assert store.steps() == [1]


@pytest.mark.parametrize(("function", "name"), [("mkdir", "snapshots"), ("fsync", "probe")])
def test_a_full_disk_at_the_start_is_a_line_and_it_is_tried_again_with_the_first_snapshot(
    function: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Store(str(tmp_path / "snapshots"))
    if name == "probe":
        (tmp_path / "snapshots").mkdir()
        Path(store.path("partial-step_00000003.safetensors")).write_bytes(b"what an unfinished write left")
    disk = FaultyDisk(monkeypatch, function, name)
    store.prepare()
    assert caplog.messages == [f"there is no room for snapshots in {store.url} (No space left on device)"]
    with pytest.raises(OSError, match="No space left on device"):
        write(store, make_manifest(1))
    disk.broken = False
    write(store, make_manifest(2))
    assert store.steps() == [2]
    assert not [name for name in file_names(store) if "step_00000002" not in name]


def test_at_the_start_only_what_a_killed_job_left_is_removed(store: Store) -> None:
    ours = ["partial-step_00000003", "partial-step_00000003.json", "partial-partial-step_00000003"]
    ours += ["step_00000003.safetensors", f"partial-probe-{32 * '0'}"]
    users = ["partial-results.csv", "partial-step_3.json", "probe-1", f"probe-{os.getpid()}", "step_x"]
    for name in ours + users:
        Path(store.path(name)).write_text("mine")
    Path(store.path("partial-x")).mkdir()
    store.prepare()
    assert file_names(store) == sorted([*users, "partial-x"])
    assert {Path(store.path(name)).read_text() for name in users} == {"mine"}


def test_an_upload_that_keeps_failing_or_is_truncated_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(f"memory://{random.random()}/snapshots", retries_s=(0.0,))
    content = b"conten"
    monkeypatch.setattr(store.files, "put_file", lambda _, path: store.files.pipe_file(path, content))
    with pytest.raises(OSError, match="has 6 bytes of 7 after writing"):
        store.write_atomic("step_00000001.json", b"content")
    monkeypatch.setattr("mingpt.snapshot.file_store.write_chunks", FaultyDisk(monkeypatch, "write", "").call)
    with pytest.raises(UserError, match=r"kept in TMPDIR until it is uploaded \(No space left on device"):
        store.write_atomic("step_00000002.json", b"content")


def test_a_snapshot_is_found_from_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "run" / "snapshots"))
    store.prepare()
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
    (tmp_path / "ckpt.pt").touch()
    for name in ("nowhere", "ckpt.pt"):
        with pytest.raises(
            UserError, match=rf"there is no snapshot in .*/{name}: .* import it first: .*data\.md"
        ):
            open_snapshot(str(tmp_path / name))


def test_the_best_snapshot_has_the_lowest_validation_loss_of_its_own_step(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    write(store, make_manifest(5))
    with pytest.raises(UserError, match="there is no best snapshot in"):
        open_snapshot(store.root, best=True)
    for step, loss in ((1, 2.0), (2, 1.0), (3, 3.0)):
        write(store, make_manifest(step, loss))
    assert open_snapshot(f"{store.root}@best").manifest.step == 2
    Path(store.path("step_00000002.safetensors")).write_bytes(b"damaged")
    assert open_snapshot(store.root, best=True).manifest.step == 1
    assert [message.partition(":")[0] for message in caplog.messages] == [
        f"snapshot of step 2 in {store.root} skipped"
    ]


def test_all_files_of_a_step_are_set_aside_and_removed_the_manifest_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(store, make_manifest(step))
    store.quarantine(2, "for a test")
    names = [f"damaged-1-step_00000002.{kind}" for kind in sorted(KINDS)]
    assert [name for name in file_names(store) if "00000002" in name] == names
    assert store.steps() == [1]
    disk = FaultyDisk(monkeypatch, "remove", "safetensors", errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        store.remove(1)
    assert store.steps() == [], "its manifest is gone before any other file of it"
    disk.broken = False
    store.remove(1)
    assert file_names(store) == names


def test_weights_are_used_though_the_optimizer_state_beside_them_is_damaged(store: Store) -> None:
    for step in (1, 2):
        write(store, make_manifest(step))
    path = Path(store.path("step_00000002.optimizer.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    snapshot = open_snapshot(store.root, weights_only=True)
    weights = snapshot.tensors("model.")
    assert list(weights) == ["wte", "half"] and torch.equal(weights["wte"], TENSORS["model.wte"])
    assert (snapshot.manifest.step, open_snapshot(store.root).manifest.step) == (2, 1)


LARGE = {"model.a": torch.randn(100, 100), "model.b": torch.randn(5), "optimizer.a": torch.zeros(3)}


def test_an_upload_that_breaks_off_is_repeated_and_otherwise_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with object_store(monkeypatch) as bucket:
        bucket.mkdir("runs")
        store = Store("s3://runs/one", retries_s=(0.0,))
        store.prepare()
        put_file, broken = store.files.put_file, list[str]()

        def put_tensors(local: str, path: str) -> None:
            if path.endswith(".safetensors") and len(broken) < 3:
                broken.append(path)
                raise OSError("connection lost")
            put_file(local, path)

        monkeypatch.setattr(store.files, "put_file", put_tensors)
        with pytest.raises(OSError, match="connection lost"):
            write(store, make_manifest(1), LARGE)
        assert len(broken) == 2 and store.names() == []
        write(store, make_manifest(1), LARGE)
        assert len(broken) == 3 and "and is retried" in caplog.text
        snapshot = store.read(1)
        assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in LARGE.items())
