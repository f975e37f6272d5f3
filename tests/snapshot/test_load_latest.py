"""Snapshots of a loop of one's own: saved by one rank, with a manifest of two fields, and loaded by all."""

from pathlib import Path

import pytest
import torch
from support.single_process import SingleProcess
from support.snapshots import make_store, write
from torch import Tensor

from mingpt.base.errors import UserError
from mingpt.snapshot import Manifest, load_latest
from mingpt.training.contents import check_model


def make_state(value: float) -> dict[str, Tensor]:
    return {
        "model.weight": torch.full((5, 3), value),
        "optimizer.weight.momentum": torch.full((5, 3), -value),
    }


def test_a_snapshot_of_other_tensors_is_refused_here_and_by_train_py(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    assert load_latest(store, make_state(0.0), SingleProcess()) is None
    write(store, Manifest(step=2, windows=16), make_state(2.0))
    integers = torch.zeros(5, 3, dtype=torch.int64)
    others = [{"model.weight": torch.zeros(5, 3)}]
    others += [make_state(0.0) | {"model.weight": other} for other in (torch.zeros(3, 5), integers)]
    for other in others:
        with pytest.raises(UserError, match="holds a snapshot of other tensors"):
            load_latest(store, other, SingleProcess())
    with pytest.raises(UserError, match="written by a training loop of your own, not by a run"):
        store.read(2, check_model)
