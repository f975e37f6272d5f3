"""Uploads to S3 by s3fs: an object appears when it is whole, and a short failure costs a retry."""

import pytest
import torch
from support.object_store import object_store
from support.snapshots import make_manifest, write

from mingpt.snapshot import SnapshotStore

TENSORS = {"model.a": torch.randn(100, 100), "model.b": torch.randn(5), "optimizer.a": torch.zeros(3)}


def test_an_upload_that_breaks_off_is_repeated_and_otherwise_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with object_store(monkeypatch) as bucket:
        bucket.mkdir("runs")
        store = SnapshotStore("s3://runs/one", retries_s=(0.0,))
        store.prepare()
        put_file, broken = store.files.put_file, list[str]()

        def put_tensors(local: str, path: str) -> None:
            if path.endswith(".safetensors") and len(broken) < 3:
                broken.append(path)
                raise OSError("connection lost")
            put_file(local, path)

        monkeypatch.setattr(store.files, "put_file", put_tensors)
        with pytest.raises(OSError, match="connection lost"):
            write(store, make_manifest(1), TENSORS)
        assert len(broken) == 2 and store.names() == []
        write(store, make_manifest(1), TENSORS)
        assert len(broken) == 3 and "and is retried" in caplog.text
        snapshot = store.read(1)
        assert all(torch.equal(snapshot.read(name), tensor) for name, tensor in TENSORS.items())
