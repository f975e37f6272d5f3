import errno
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.faults import FaultyDisk
from support.snapshots import TENSORS, file_names, make_manifest, make_store, write

from mingpt.base.errors import CorruptSnapshot, UserError
from mingpt.snapshot import Entries, SnapshotStore, open_snapshot

KINDS = ["json", "safetensors", "optimizer.safetensors"]  # of the three files of a snapshot


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    return make_store(tmp_path)


def test_what_was_saved_is_read_back(store: SnapshotStore) -> None:
    write(store, make_manifest(12))
    assert file_names(store) == [f"step_00000012.{kind}" for kind in sorted(KINDS)]
    snapshot, corrupt = store.find_newest()
    assert snapshot is not None
    assert corrupt == {}
    assert snapshot.manifest["step"] == 12
    sizes = [os.path.getsize(store.path(f"step_00000012.{kind}")) for kind in KINDS[1:]]
    assert snapshot.manifest["bytes"] == sum(sizes)
    tensors = snapshot.tensors()
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in tensors.items():
        assert torch.equal(TENSORS[name], tensor)
        assert TENSORS[name].dtype == tensor.dtype


def test_the_same_state_gives_the_same_bytes(store: SnapshotStore) -> None:
    write(store, make_manifest(1), TENSORS)
    write(store, make_manifest(2), dict(reversed(TENSORS.items())))
    assert store.read(1).manifest["sha256"] == store.read(2).manifest["sha256"]


@pytest.mark.parametrize(
    ("kind", "stride"),
    [
        ("json", 11),
        ("safetensors", 3),
        ("optimizer.safetensors", 1),
        pytest.param("json", 1, marks=pytest.mark.slow),
        pytest.param("safetensors", 1, marks=pytest.mark.slow),
    ],
)
def test_every_flipped_bit_is_noticed_and_the_snapshot_before_is_used(
    store: SnapshotStore, kind: str, stride: int
) -> None:
    """Every bit of all files, one at a time; or every third or eleventh, which are bits of all places."""
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
    snapshot, corrupt = store.find_newest()
    assert snapshot is not None
    assert snapshot.manifest["step"] == 1
    assert list(corrupt) == [2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_noticed(store: SnapshotStore, kind: str) -> None:
    write(store, make_manifest(2))
    path = Path(store.path(f"step_00000002.{kind}"))
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(CorruptSnapshot):
            store.read(2)


@pytest.mark.parametrize("missing", KINDS)
def test_half_a_snapshot_is_quarantined_by_name(
    store: SnapshotStore, missing: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A second corrupt snapshot of the same step does not overwrite the first."""
    caplog.set_level(logging.WARNING)
    write(store, make_manifest(1))
    for attempt in (1, 2):
        write(store, make_manifest(2))
        Path(store.path(f"step_00000002.{missing}")).unlink()
        snapshot, corrupt = store.find_newest()
        assert snapshot is not None
        assert snapshot.manifest["step"] == 1
        assert list(corrupt) == [2]
        store.quarantine(2, corrupt[2])
        target = store.path(f"damaged-{attempt}-step_00000002.")
        assert f"snapshot of step 2 set aside as {target}" in caplog.text
    assert len([name for name in file_names(store) if name.startswith("damaged-")]) == 4
    assert store.steps() == store.steps("safetensors") == [1]


def test_writing_a_step_again_replaces_it(store: SnapshotStore) -> None:
    write(store, make_manifest(1))
    write(store, make_manifest(1), {"model.a": torch.zeros(2)})
    assert list(store.read(1).tensors()) == ["model.a"]
    assert file_names(store) == ["step_00000001.json", "step_00000001.safetensors"]


def test_what_an_unfinished_write_left_is_removed(store: SnapshotStore) -> None:
    Path(store.path("partial-step_00000003.safetensors")).write_bytes(b"half")
    store.prepare()
    assert file_names(store) == []


def test_a_place_that_cannot_be_written_or_has_no_driver_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written to"):
        SnapshotStore(str(tmp_path / "file" / "snapshots")).prepare()
    with pytest.raises(UserError, match="s4"):
        SnapshotStore("s4://bucket/snapshots")


def test_snapshots_in_memory_work_like_those_at_any_other_url() -> None:
    store = SnapshotStore(f"memory://{random.random()}/snapshots")
    store.prepare()
    assert store.is_process_private
    assert store.find_newest() == (None, {})
    write(store, make_manifest(1))
    write(store, make_manifest(2))
    store.files.pipe_file(store.path("step_00000002.json"), b"torn")
    snapshot, corrupt = store.find_newest()
    assert snapshot is not None
    assert snapshot.manifest["step"] == 1
    store.quarantine(2, corrupt[2])
    store.remove(1)
    assert store.find_newest() == (None, {})
    assert len(store.names()) == 3


@pytest.mark.parametrize(("function", "name"), [("mkdir", "snapshots"), ("fsync", "probe")])
def test_a_full_disk_at_the_start_is_a_line_and_it_is_tried_again_with_the_first_snapshot(
    function: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = SnapshotStore(str(tmp_path / "snapshots"))
    disk = FaultyDisk(monkeypatch, function, name)
    store.prepare()
    assert caplog.messages == [f"there is no room for snapshots in {store.url} (No space left on device)"]
    with pytest.raises(OSError, match="No space left on device"):
        write(store, make_manifest(1))
    disk.broken = False
    write(store, make_manifest(2))
    assert store.steps() == [2]
    assert not [name for name in file_names(store) if "step_00000002" not in name]


def test_unfinished_files_are_removed_before_a_full_disk_is_noticed(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(store.path("partial-step_00000003.safetensors")).write_bytes(b"half")
    FaultyDisk(monkeypatch, "fsync", "probe")
    store.prepare()
    assert file_names(store) == []


def test_a_folder_that_cannot_be_written_for_other_reasons_is_refused(
    store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    FaultyDisk(monkeypatch, "fsync", "probe", errno.EROFS)
    with pytest.raises(UserError, match="Read-only file system"):
        store.prepare()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_damaged_or_missing_is_noticed(kind: str, store: SnapshotStore) -> None:
    write(store, make_manifest(1))
    store.read(1)
    path = Path(store.path(f"step_00000001.{kind}"))
    content = path.read_bytes()
    for damaged in (content[:-1], content[:-1] + b"!"):
        path.write_bytes(damaged)
        with pytest.raises(CorruptSnapshot):
            store.read(1)
    os.unlink(path)
    with pytest.raises(CorruptSnapshot, match="is missing"):
        store.read(1)


def test_an_upload_that_fails_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = SnapshotStore(f"memory://{random.random()}/snapshots", retries_s=(0.0, 0.0))
    upload = store.files.pipe_file
    failures = iter([OSError("busy"), OSError("busy again")])

    def fail_twice(path: str, content: bytes) -> None:
        for error in failures:
            raise error
        upload(path, content)

    monkeypatch.setattr(store.files, "pipe_file", fail_twice)
    store.write_atomic("step_00000001.json", b"content")
    assert store.files.cat_file(store.path("step_00000001.json")) == b"content"
    assert caplog.text.count("and is retried") == 2


def test_an_upload_that_keeps_failing_or_is_truncated_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SnapshotStore(f"memory://{random.random()}/snapshots", retries_s=(0.0,))
    upload = store.files.pipe_file
    monkeypatch.setattr(store.files, "pipe_file", lambda path, content: upload(path, content[:-1]))
    with pytest.raises(OSError, match="has 6 bytes of 7 after writing"):
        store.write_atomic("step_00000001.json", b"content")


def test_a_snapshot_is_found_from_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path / "run" / "snapshots"))
    store.prepare()
    write(store, make_manifest(7))
    for where in (
        tmp_path / "run",
        store.root,
        store.path("step_00000007.safetensors"),
        store.path("step_00000007.json"),
        f"file://{tmp_path}/run/",
    ):
        assert open_snapshot(str(where)).manifest["step"] == 7
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text(json.dumps({"snapshot": {"path": store.root}}))
    assert open_snapshot(str(tmp_path / "other")).manifest["step"] == 7
    with pytest.raises(UserError, match="there is no snapshot in"):
        open_snapshot(str(tmp_path / "nowhere"))


def test_a_snapshot_given_by_name_that_is_corrupt_is_refused(store: SnapshotStore) -> None:
    write(store, make_manifest(7))
    path = Path(store.path("step_00000007.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"cannot be used: its file step_00000007\.safetensors has"):
        open_snapshot(str(path))


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to(path.parent / "nowhere")


def make_link_to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").write_text("")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "make", [make_fifo, make_loop, make_link_to_nothing, make_link_to_a_device, make_folder]
)
def test_what_is_no_file_is_quarantined_like_a_damaged_one(
    make: Callable[[Path], None], kind: str, store: SnapshotStore
) -> None:
    """And waited for by nobody."""
    for step in (1, 2):
        write(store, make_manifest(step))
    path = Path(store.path(f"step_00000002.{kind}"))
    path.unlink()
    make(path)
    snapshot, corrupt = store.find_newest()
    assert snapshot is not None
    assert snapshot.manifest["step"] == 1
    assert list(corrupt) == [2]
    store.quarantine(2, corrupt[2])
    assert store.steps() == [1]
    assert f"damaged-1-step_00000002.{kind}" in file_names(store)


def test_a_snapshot_under_another_steps_name_is_corrupt(store: SnapshotStore) -> None:
    write(store, make_manifest(1))
    for kind in KINDS:
        Path(store.path(f"step_00000001.{kind}")).rename(store.path(f"step_00000002.{kind}"))
    with pytest.raises(CorruptSnapshot, match="its manifest is that of step 1"):
        store.read(2)


def test_the_check_sees_manifest_and_tensors_before_these_are_read(store: SnapshotStore) -> None:
    write(store, make_manifest(1))
    path = Path(store.path("step_00000001.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    def refuse(manifest: dict[str, Any], entries: Entries) -> None:
        raise CorruptSnapshot(f"step {manifest['step']} has {sorted(entries)}")

    with pytest.raises(
        CorruptSnapshot, match=r"step 1 has \['model.half', 'model.wte', 'optimizer.wte.step'\]"
    ):
        store.read(1, refuse)


def test_weights_that_are_not_finite_are_corrupt(store: SnapshotStore) -> None:
    write(store, make_manifest(1), {"model.a": torch.tensor([1.0, float("nan")])})
    with pytest.raises(CorruptSnapshot, match="not finite"):
        store.read(1)


def test_a_manifest_of_any_size_is_not_read_past_a_limit(store: SnapshotStore) -> None:
    write(store, make_manifest(1))
    os.truncate(store.path("step_00000001.json"), 10**12)  # a sparse file
    with pytest.raises(CorruptSnapshot, match="its manifest has 1,000,000,000,000 bytes"):
        store.read(1)


def test_what_was_set_aside_is_evidence_of_a_completed_snapshot(store: SnapshotStore) -> None:
    """A tensor file without a manifest is none: its save was not completed."""
    assert store.completed_steps() == (0, 0)
    write(store, make_manifest(3))
    assert store.completed_steps() == (3, 0)
    store.quarantine(3, "for a test")
    assert store.completed_steps() == (0, 3)
    Path(store.path("damaged-1-step_00000003.json")).unlink()
    Path(store.path("step_00000005.safetensors")).write_bytes(b"half")
    assert store.completed_steps() == (0, 0)


@pytest.mark.parametrize(
    "content",
    ["snapshot: {path: 5}", "[" * 400, "x" * 100_000, "snapshot: 2001-99-99", "\ud800", "a: b: c"],
)
def test_a_damaged_config_beside_the_snapshots_is_ignored(content: str, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    write(store, make_manifest(1))
    (tmp_path / "config.yaml").write_bytes(content.encode(errors="surrogatepass"))
    assert open_snapshot(str(tmp_path)).manifest["step"] == 1
