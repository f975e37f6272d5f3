"""Snapshots of a loop of one's own: saved by one rank, with a manifest of two fields, and loaded by all."""

from pathlib import Path

import pytest
import torch
from support.forks import results_of
from support.single_process import SingleProcess
from support.snapshots import make_store, save
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.distributed import DistributedContext
from mingpt.snapshot import Manifest, SnapshotSaver, SnapshotStore, load_latest
from mingpt.snapshot.contents import check_model


def make_state(value: float) -> dict[str, Tensor]:
    return {
        "model.weight": torch.full((5, 3), value),
        "optimizer.weight.momentum": torch.full((5, 3), -value),
    }


@pytest.fixture
def store(tmp_path: Path) -> SnapshotStore:
    """A store with snapshots of steps 1 and 2."""
    store = make_store(tmp_path)
    assert load_latest(store, make_state(0.0), SingleProcess()) is None
    for step in (1, 2):
        save(SnapshotSaver(store), Manifest(step=step, windows=8 * step), make_state(float(step)))
    return store


def test_all_ranks_get_the_newest_valid_snapshot(store: SnapshotStore) -> None:
    def load(context: DistributedContext) -> tuple[Manifest | None, dict[str, Tensor]]:
        state = make_state(0.0)
        return load_latest(store, state, context), state

    for step in (2, 1):
        for manifest, state in results_of(2, load):
            assert manifest is not None and (manifest.step, manifest.windows) == (step, 8 * step)
            assert all(torch.equal(state[name], tensor) for name, tensor in make_state(float(step)).items())
        Path(store.path(f"step_{step:08d}.safetensors")).write_bytes(b"")
    with pytest.raises(UserError, match=r"no snapshot in .* can be used \(step 2: "):
        load(SingleProcess())


def test_a_snapshot_of_other_tensors_is_refused_here_and_by_train_py(store: SnapshotStore) -> None:
    with pytest.raises(UserError, match=r"model\.weight is torch\.int64, and only float32"):
        load_latest(store, {"model.weight": torch.zeros(5, 3, dtype=torch.int64)}, SingleProcess())
    for other in ({"model.weight": torch.zeros(5, 3)}, make_state(0.0) | {"model.weight": torch.zeros(3, 5)}):
        with pytest.raises(UserError, match="holds a snapshot of other tensors"):
            load_latest(store, other, SingleProcess())
    with pytest.raises(UserError, match="written by a training loop of your own, not by a run"):
        store.read(2, check_model)
