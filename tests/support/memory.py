"""Small states, one for each step, and the fields of their manifests, for tests of snapshots."""

from typing import Any

import torch
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import Config, DataConfig, ModelConfig, to_dict
from mingpt.distributed import DistributedContext
from mingpt.snapshot import StoredState
from mingpt.training.contents import tensor_shapes

CONFIG = Config(
    data=DataConfig(block_size=7), model=ModelConfig(n_layer=1, n_head=1, n_embd=8, arch="modern")
)
# Fields of each manifest.
FIELDS: dict[str, Any] = {"config": to_dict(CONFIG), "tokenizer": {"kind": "none", "vocab_size": 11}}
SHAPES = tensor_shapes(CONFIG, 11)


def make_state(step: int) -> dict[str, Tensor]:
    """Return tensors by name, each with the elements `step`, `step` + 1, `step` + 2 and so on."""
    return {
        name: torch.arange(float(torch.Size(shape).numel())).view(shape) + step
        for name, shape in SHAPES.items()
    }


def check_values(found: StoredState, context: DistributedContext) -> int:
    step = found.manifest.step
    expected = make_state(step)
    assert found.shapes == SHAPES
    values = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found.copy_into(values, RowMap(SHAPES), context.rank, context)
    for name in SHAPES:
        assert torch.equal(values[name], expected[name]), name
    return step
