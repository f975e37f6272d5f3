"""Tensors and manifests for tests."""

from pathlib import Path
from typing import Any

import torch

from mingpt.snapshot import SnapshotStore, to_safetensors

TENSORS = {
    "model.wte": torch.arange(12.0).view(3, 4),
    "optimizer.wte.step": torch.tensor(3.0),
    "model.half": torch.ones(5, dtype=torch.bfloat16),
}
CONTENT = to_safetensors(TENSORS)


def make_manifest(step: int, loss: float | None = None) -> dict[str, Any]:
    """`loss` is a validation loss measured at this step."""
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


def make_store(tmp_path: Path) -> SnapshotStore:
    """An empty one in a folder."""
    store = SnapshotStore(str(tmp_path / "snapshots"), retries_s=(0.0, 0.0))
    store.prepare()
    return store


def file_names(store: SnapshotStore) -> list[str]:
    return sorted(path.name for path in Path(store.root).iterdir())
