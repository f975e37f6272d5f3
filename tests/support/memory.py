"""A small state of a run, different at each step, and its manifest, for tests of snapshots in memory."""

import torch
from torch import Tensor

from mingpt.config import Config, DataConfig, ModelConfig, to_dict
from mingpt.distributed import DistributedContext
from mingpt.training.state import StoredState, snapshot_shapes
from support.snapshots import make_manifest

CONFIG = Config(
    data=DataConfig(block_size=7), model=ModelConfig(n_layer=1, n_head=1, n_embd=8, arch="modern")
)
MANIFEST = make_manifest(0) | {"config": to_dict(CONFIG), "vocabulary": "abcdefghijk", "after": 0}
SHAPES = snapshot_shapes(MANIFEST, 11)


def make_state(step: int) -> dict[str, Tensor]:
    """A state with a different number in each element."""
    return {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) + step
        for name, shape in SHAPES.items()
    }


def check_values(found: StoredState, context: DistributedContext) -> int:
    """Assert that all tensors are those of the snapshot's step; returns the step. Collective."""
    step = int(found.manifest["step"])
    expected = make_state(step)
    assert found.shapes == SHAPES and "shard" not in found.manifest
    for name in found.shapes:
        assert torch.equal(found.tensor(name, context), expected[name]), name
    return step
