"""Files that go up to S3 in parts: nothing appears before all are there; a failure leaves no part behind."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.object_store import object_store
from support.snapshots import make_manifest, write

from mingpt.snapshot import SnapshotStore

MIB = 1 << 20
PLACE = "s3://runs/one"
TENSORS = {"model.a": torch.randn(2 * MIB), "model.b": torch.randn(5), "optimizer.a": torch.zeros(3)}


@pytest.fixture(scope="module")
def server() -> Iterator[Any]:
    """An S3 server with the bucket `runs`."""
    with pytest.MonkeyPatch.context() as patch, object_store(patch) as files:
        files.mkdir("runs")
        yield files


@pytest.fixture
def bucket(server: Any) -> Any:
    """The bucket without files."""
    if server.exists("runs/one"):
        server.rm("runs/one", recursive=True)
    return server


def open_store() -> SnapshotStore:
    """A store that sends tensor files in parts of 5 MiB, the least that S3 takes."""
    return SnapshotStore(PLACE, retries_s=(0.0,), upload_part_bytes=5 * MIB)


def uploads(bucket: Any) -> list[tuple[str, str]]:
    """(key, id) of the uploads that are not completed."""
    listed = bucket.call_s3("list_multipart_uploads", Bucket="runs").get("Uploads", [])
    return [(upload["Key"], upload["UploadId"]) for upload in listed]


class BrokenNetwork:
    """A network on which calls of these names raise, `times` times, from the upload of a part on."""

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
    snapshot = store.read(1)
    assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in TENSORS.items())
    assert torch.equal(snapshot.read("model.a", 10, 20), TENSORS["model.a"][10:20])
    assert uploads(bucket) == []
