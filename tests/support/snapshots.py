"""Tensors, manifests and snapshots for tests."""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor

from mingpt.distributed.background_group import BackgroundGroup
from mingpt.snapshot import Snapshot, SnapshotSaver, SnapshotStore, specs_of
from mingpt.snapshot.layout import StagingBuffer, make_layout
from mingpt.snapshot.reading import SourceFile, TensorFile
from mingpt.snapshot.saver import Transfer

TENSORS = {
    "model.wte": torch.arange(12.0).view(3, 4),
    "optimizer.wte.step": torch.tensor(1.0),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
}
PARTS = {f"{kind}.{letter}": torch.randn(6, 4) for kind in ("model", "optimizer") for letter in "abcde"}


def make_manifest(step: int, loss: float | None = None) -> dict[str, Any]:
    """The manifest of a step; `loss` is a validation loss measured at this step."""
    return {
        "step": step,
        "windows": step * 8,
        "config": {},
        "vocabulary": "ab",
        "data": {"path": "data/input.txt", "sha256": "0" * 64},
        "software": {"torch": "2.13.0", "device": "cpu AVX512", "threads": 1, "dtype": "float32"},
        "audit": "0" * 64,
        "metrics": {} if loss is None else {"val": {"step": step, "val/loss": loss}},
    }


def to_safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    """The bytes of one safetensors file."""
    staging = StagingBuffer(tensors)
    staging.fill(tensors)
    return bytes(staging.content)


def open_content(content: bytes) -> TensorFile:
    """A safetensors file with these bytes."""
    files = fsspec.filesystem("memory")
    path = f"/{uuid.uuid4().hex}"
    files.pipe_file(path, content)
    return TensorFile(SourceFile(files, path, "the file", ()))


def snapshot_of(manifest: dict[str, Any], tensors: Mapping[str, Tensor]) -> Snapshot:
    """A snapshot that is in no folder."""
    return Snapshot(manifest, [open_content(to_safetensors(tensors))])


def make_store(tmp_path: Path) -> SnapshotStore:
    """An empty store in a folder."""
    store = SnapshotStore(str(tmp_path / "snapshots"), retries_s=(0.0, 0.0))
    store.prepare()
    return store


def transfer(step: int, tensors: Mapping[str, Tensor] = TENSORS) -> Transfer:
    staging = StagingBuffer(tensors)
    staging.fill(tensors)
    return Transfer(make_layout(specs_of(tensors), step), staging, BackgroundGroup(0, 1))


def write(store: SnapshotStore, manifest: dict[str, Any], tensors: Mapping[str, Tensor] = TENSORS) -> None:
    """Write a whole snapshot."""
    SnapshotSaver(store, 1, False).write_once(manifest, transfer(manifest["step"], tensors))


def save(saver: SnapshotSaver, manifest: dict[str, Any], tensors: Mapping[str, Tensor] = TENSORS) -> None:
    """Save to the end, as a saver does in the background."""
    saver.write(manifest, transfer(manifest["step"], tensors))


def file_names(store: SnapshotStore) -> list[str]:
    return sorted(path.name for path in Path(store.root).iterdir())
