from functools import cache

import pytest
import torch
from support.exchanges import pieces, run_workers
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import OptimizerConfig
from mingpt.distributed.transport import Transport
from mingpt.optim.optimizer import AdamW

STEPS = 4
SHAPES = [(rows, *columns) for rows in range(1, 71) for columns in ((), (1,), (3,), (16,), (48,))]


@cache
def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {str(shape): torch.randn(shape, generator=generator) for shape in SHAPES}


@cache
def gradient(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return {str(shape): torch.randn(shape, generator=generator) * 0.01 for shape in SHAPES}


def trained(rows: RowMap, transport: Transport) -> dict[str, dict[str, Tensor]]:
    """{parameter: {"weight" or the state's name: this worker's rows}} after some steps."""
    weights = pieces(initial(), rows, transport.rank)
    optimizer = AdamW(weights, rows.shapes, OptimizerConfig())
    for step in range(STEPS):
        optimizer.step(0.01, pieces(gradient(step), rows, transport.rank))
    return {name: optimizer.state[name] | {"weight": weight} for name, weight in weights.items()}


@cache
def trained_whole() -> dict[str, dict[str, Tensor]]:
    return trained(RowMap({str(shape): shape for shape in SHAPES}), Transport(0, 1))


@pytest.mark.parametrize("workers", range(1, 9))
def test_the_rows_of_several_workers_have_the_bits_of_whole_tensors(workers: int) -> None:
    """Without padding, a fused kernel rounds the last elements of a tensor differently."""
    whole = trained_whole()
    parts = run_workers(RowMap({str(shape): shape for shape in SHAPES}, workers, ("",)), trained)
    for name, expected in whole.items():
        for key in ("weight", "exp_avg", "exp_avg_sq"):
            together = torch.cat([part[name][key] for part in parts])
            assert torch.equal(together, expected[key]), f"{key} of {name}"
        assert all(part[name]["step"] == STEPS for part in parts)


def test_gradients_are_left_as_they_are() -> None:
    weights = {"even": torch.ones(16), "odd": torch.ones(5)}
    gradients = {name: torch.full_like(weight, 0.5) for name, weight in weights.items()}
    AdamW(weights, {"even": (16,), "odd": (5,)}, OptimizerConfig()).step(0.01, gradients)
    assert all(bool((gradient == 0.5).all()) for gradient in gradients.values())
    assert all(bool((weight != 1.0).all()) for weight in weights.values())
