"""Files that go up to S3 in parts: nothing appears before all of them have, and none are left behind."""

import datetime
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile
from support.object_store import object_store
from support.snapshots import make_manifest, transfer, write

from mingpt.base import events
from mingpt.snapshot import SnapshotStore
from mingpt.snapshot.files import abort_unfinished_uploads, discard, unfinished_uploads

MIB = 1 << 20
PLACE = "s3://runs/one"
FILES = ["step_00000001.json", "step_00000001.optimizer.safetensors", "step_00000001.safetensors"]
TENSORS = {"model.a": torch.randn(2 * MIB), "model.b": torch.randn(5), "optimizer.a": torch.zeros(3)}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """An S3 server with the bucket `runs`."""
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as files:
        files.mkdir("runs")
        yield files


@pytest.fixture
def bucket(server: Any) -> Any:
    """With nothing in it."""
    for _, key, upload in uploads(server):
        server.call_s3("abort_multipart_upload", Bucket="runs", Key=key, UploadId=upload)
    if server.exists("runs/one"):
        server.rm("runs/one", recursive=True)
    return server


def open_store() -> SnapshotStore:
    """One that sends tensor files in parts of 5 MiB, the least that S3 takes."""
    return SnapshotStore(PLACE, retries_s=(0.0,), upload_part_bytes=5 * MIB)


def uploads(bucket: Any) -> list[tuple[str, str, str]]:
    """That are not completed."""
    return unfinished_uploads(bucket, "runs/", None)


class BrokenNetwork:
    """From the upload of a part on, calls of these names raise, `times` times."""

    def __init__(self, store: SnapshotStore, name: str, part: int, times: int) -> None:
        self.call, self.name, self.part, self.times = store.files.call_s3, name, part, times
        self.raised = 0
        store.files.call_s3 = self

    def __call__(self, method: str, *more: Any, **named: Any) -> Any:
        is_due = method == self.name and named.get("PartNumber", self.part) == self.part
        if is_due and self.raised < self.times:
            self.raised += 1
            raise OSError("connection lost")
        return self.call(method, *more, **named)


def save_and_die(part_bytes: int) -> None:
    """In a process of its own: dies when half of the first file is sent."""

    def die(name: str, written: int, size: int) -> None:
        if 2 * written > size > MIB:
            os.kill(os.getpid(), signal.SIGKILL)

    events.subscribe("file_progress", die)
    write(SnapshotStore(PLACE, upload_part_bytes=part_bytes), make_manifest(5), TENSORS)


def test_a_snapshot_that_goes_up_in_parts_is_read_by_ranges(bucket: Any) -> None:
    store = open_store()
    store.prepare()
    write(store, make_manifest(1), TENSORS)
    snapshot = store.read(1)
    assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in TENSORS.items())
    assert torch.equal(snapshot.read("model.a", 10, 20), TENSORS["model.a"][10:20])
    assert store.names() == FILES
    assert uploads(bucket) == []


@pytest.mark.parametrize(
    ("name", "part"), [("create_multipart_upload", 0), ("upload_part", 2), ("complete_multipart_upload", 0)]
)
def test_an_upload_that_breaks_off_is_repeated_and_otherwise_leaves_nothing(
    name: str, part: int, bucket: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    store = open_store()
    store.prepare()
    network = BrokenNetwork(store, name, part, times=2)
    with pytest.raises(OSError, match="connection lost"):
        write(store, make_manifest(1), TENSORS)
    store.files.call_s3 = network.call
    assert (network.raised, store.names(), uploads(bucket)) == (2, [], [])
    network = BrokenNetwork(store, name, part, times=1)
    write(store, make_manifest(1), TENSORS)
    store.files.call_s3 = network.call
    assert network.raised == 1 and "and is retried" in caplog.text
    assert torch.equal(store.read(1).read("model.a"), TENSORS["model.a"])
    assert uploads(bucket) == []


@pytest.mark.slow
def test_what_a_process_that_was_killed_had_sent_is_freed(bucket: Any) -> None:
    store = open_store()
    store.prepare()
    write(store, make_manifest(1), TENSORS)
    child = multiprocessing.get_context("spawn").Process(target=save_and_die, args=(5 * MIB,))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    assert [key for _, key, _ in uploads(bucket)] == ["one/step_00000005.safetensors"]
    found, corrupt = store.find_newest()
    assert (found and found.manifest["step"], corrupt) == (1, {})
    store.begin(5)
    assert uploads(bucket) == [], "the same step is begun again"
    store.prepare()
    assert store.names() == FILES


def test_old_uploads_of_this_folder_are_aborted_and_no_others(bucket: Any) -> None:
    """This server gives each the same date, in 2010."""
    store = open_store()
    store.prepare()
    for key in ("one/step_00000001.safetensors", "one/other", "two/step_00000001.safetensors"):
        bucket.call_s3("create_multipart_upload", Bucket="runs", Key=key)
    now, then = (datetime.datetime(year, 1, 1, tzinfo=datetime.UTC) for year in (2100, 2000))
    age_s = (now - then).total_seconds()
    abort_unfinished_uploads(store.files, "runs/one/step_", age_s)
    assert len(uploads(bucket)) == 3, "they are younger"
    store.prepare()
    assert [key for _, key, _ in uploads(bucket)] == ["one/other", "two/step_00000001.safetensors"]


class Pages:
    """An S3 that lists one upload at a time."""

    def __init__(self) -> None:
        self.keys = ["a", "b", "c"]
        self.aborted: list[str] = []

    def split_path(self, path: str) -> tuple[str, str, None]:
        bucket, _, key = path.partition("/")
        return bucket, key, None

    def call_s3(self, method: str, **named: Any) -> dict[str, Any]:
        if method == "abort_multipart_upload":
            self.aborted.append(named["Key"])
            return {}
        place = self.keys.index(named["KeyMarker"]) + 1 if "KeyMarker" in named else 0
        upload = {"Key": self.keys[place], "UploadId": "1", "Initiated": datetime.datetime.now(datetime.UTC)}
        is_last = place == len(self.keys) - 1
        return {
            "Uploads": [upload],
            "IsTruncated": not is_last,
            "NextKeyMarker": self.keys[place],
            "NextUploadIdMarker": "1",
        }


def test_a_long_list_of_uploads_is_read_to_its_end() -> None:
    pages = Pages()
    abort_unfinished_uploads(pages, "bucket/prefix", None)
    assert pages.aborted == pages.keys


def test_whoever_may_not_list_uploads_can_write_all_the_same(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(Pages):
        def call_s3(self, method: str, **named: Any) -> dict[str, Any]:
            raise PermissionError("AccessDenied")

    caplog.set_level(logging.INFO)
    abort_unfinished_uploads(Refusing(), "bucket/prefix", None)
    expected = "unfinished uploads to bucket/prefix* cannot be looked for (PermissionError: AccessDenied)"
    assert caplog.messages == [expected]


def test_other_drivers_have_no_uploads_to_abort_and_files_that_are_closed(tmp_path: Path) -> None:
    store = SnapshotStore(str(tmp_path))
    abort_unfinished_uploads(store.files, str(tmp_path), None)
    with open(tmp_path / "file", "wb") as file:
        discard(file, "file")
        assert file.closed


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """Of a driver whose `discard` does nothing."""

    sent = 0

    def _upload_chunk(self, final: bool = False) -> bool:
        self.sent += 1
        return True


def test_a_file_that_is_discarded_is_not_completed_when_it_is_closed_later() -> None:
    upload = Upload(MemoryFileSystem(), "file", "wb", block_size=100)
    upload.write(b"half")
    discard(upload, "file")
    upload.close()
    assert upload.sent == 0


def test_parts_are_made_larger_where_there_would_be_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S3 takes 10,000 parts of a file."""
    monkeypatch.setattr("mingpt.snapshot.files.MAX_UPLOAD_PARTS", 4)
    store = SnapshotStore("memory://parts/snapshots", upload_part_bytes=10)
    asked: list[int] = []
    whole = store.files.open

    def open_file(path: str, mode: str, block_size: int) -> Any:
        asked.append(block_size)
        return whole(path, mode, block_size=block_size)

    monkeypatch.setattr(store.files, "open", open_file)
    layout = transfer(1, {"model.a": torch.zeros(100)}).layouts[0]
    store.write_file(layout, [memoryview(bytes(layout.size))])
    assert asked == [-(-layout.size // 4)]
