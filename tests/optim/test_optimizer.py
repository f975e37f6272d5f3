from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples
from support.ranks import results_of_threads
from support.training import ARCHITECTURES, Arch, Name, compute_gradients, make_model, pieces, train
from torch import Tensor

from mingpt.base.rows import RowMap
from mingpt.config import OptimizerConfig
from mingpt.distributed.transport import Transport
from mingpt.optim import Optimizer
from mingpt.optim.muon import newton_schulz
from mingpt.optim.optimizer import SCHEDULES, learning_rate


def torch_optimizers(
    named: Mapping[str, Tensor], hidden: list[str], config: OptimizerConfig
) -> list[torch.optim.Optimizer]:
    """torch's Muon for the matrices `hidden`, if any, and torch's AdamW for the rest."""
    rest = [weight for key, weight in named.items() if key not in hidden]
    groups = [
        {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), fused=True)
    if not hidden:
        return [adamw]
    muon = torch.optim.Muon(
        [named[key] for key in hidden],
        lr=0.01,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [adamw, muon]


@pytest.mark.parametrize(("name", "by_muon", "tolerance"), [("adamw", 0, 0.0), ("muon", 8, 2e-3)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_updates_are_those_of_torch(arch: Arch, name: Name, by_muon: int, tolerance: float) -> None:
    """AdamW's have torch's bits, with decay for matrices alone; sizes are multiples of 16 elements.

    Muon updates the matrices of the blocks, and AdamW the rest. Muon's updates agree as far as torch's
    products of single matrices and our products of a batch agree in bfloat16.
    """
    (model, optimizer), (theirs, _) = make_model(name, arch), make_model(name, arch)
    named = dict(theirs.named_parameters())
    matrices = [key for key, weight in named.items() if key.startswith("h.") and weight.ndim == 2]
    assert by_muon in (0, len(matrices))
    references = torch_optimizers(named, matrices[:by_muon], OptimizerConfig(name=name))
    train(model, optimizer, range(4))
    for step in range(4):
        compute_gradients(theirs, step)
        for reference in references:
            reference.step()
        theirs.zero_grad()
    for key, mine in model.named_parameters():
        torch.testing.assert_close(mine, named[key], rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize("shape", [(128, 128), (128, 384), (128, 512)])
def test_a_matrix_has_the_same_bits_in_every_batch(shape: tuple[int, int]) -> None:
    matrices = torch.randn(5, *shape, generator=torch.Generator().manual_seed(1))
    alone = torch.cat([newton_schulz(matrix) for matrix in matrices.split(1)])
    for size in (2, 3, 5):
        assert torch.equal(torch.cat([newton_schulz(part) for part in matrices.split(size)]), alone)


MATRICES = ((8, 24), (24, 8), (8, 8), (8, 24), (8, 24), (16, 8), (8, 24), (3, 17), (17, 3), (1, 5), (29, 13))
SHAPES: dict[str, tuple[int, ...]] = {f"h.{number}": shape for number, shape in enumerate(MATRICES)}
SHAPES |= {
    str(shape): shape for rows in range(1, 71) for shape in ((rows,), *((rows, n) for n in (1, 3, 16, 48)))
}


@cache
def initial() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trained(rows: RowMap, transport: Transport) -> dict[str, Tensor]:
    """This worker's rows of the weights and of the optimizer's state after some steps."""
    weights = pieces(initial(), rows, transport.rank)
    optimizer = Optimizer(weights, OptimizerConfig(name="muon"), rows, transport)
    for step in range(4):
        gradients = pieces(initial(), rows, transport.rank)
        for gradient in gradients.values():
            gradient.add_(step).square_().mul_(0.01)
        before = {name: gradient.clone() for name, gradient in gradients.items()}
        optimizer.step(0.01, gradients)
        assert all(torch.equal(gradient, before[name]) for name, gradient in gradients.items())
    return weights | optimizer.state_dict()


@cache
def trained_alone() -> dict[str, Tensor]:
    found = trained(RowMap(SHAPES), Transport(0, 1))
    assert not any(torch.equal(found[name], weight) for name, weight in initial().items())
    return found


WHOLE: tuple[str, ...] = ()
SPLIT = ("",)


@pytest.mark.parametrize("workers", [2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("sharded", [WHOLE, SPLIT], ids=["whole", "split"])
def test_several_workers_compute_the_bits_of_one(workers: int, sharded: tuple[str, ...]) -> None:
    """Some workers have no batch of matrices to compute, some tensors have fewer rows than there are workers.

    Without padding, a fused kernel rounds the last elements of a tensor differently.
    """
    rows = RowMap(SHAPES, workers, sharded)
    parts = results_of_threads(workers, lambda context: trained(rows, context.transport))
    for name, expected in trained_alone().items():
        found = [part[name] for part in parts]
        for together in [torch.cat(found)] if sharded and expected.ndim else found:
            assert torch.equal(together, expected), name


@examples(300)
@given(
    schedule=st.sampled_from([*SCHEDULES]),
    min_lr_fraction=st.floats(0, 1),
    warmup_steps=st.integers(0, 80),
    max_steps=st.integers(1, 60),
)
def test_the_learning_rate_rises_in_the_warm_up_and_then_falls_to_the_minimum(
    max_steps: int, warmup_steps: int, **options: Any
) -> None:
    config = OptimizerConfig(learning_rate=2.0, warmup_steps=warmup_steps, **options)
    rates = [learning_rate(step, config, max_steps) / 2 for step in range(1, max_steps + 1)]
    warm_up, rest = rates[:warmup_steps], rates[warmup_steps:]
    assert warm_up == pytest.approx([(1 + step) / (1 + warmup_steps) for step in range(len(warm_up))])
    assert rest == sorted(rest, reverse=True) and all(rate <= 1 for rate in rest)
    assert not rest or rest[-1] == pytest.approx(config.min_lr_fraction, abs=1e-9)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]),
        ("cosine", [0.9696, 0.8828, 0.7531, 0.6, 0.4469, 0.3172, 0.2304, 0.2]),
    ],
)
def test_the_schedules_are_a_line_and_half_a_cosine(schedule: Any, expected: list[float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, min_lr_fraction=0.2, schedule=schedule)
    assert [learning_rate(step, config, 8) for step in range(1, 9)] == pytest.approx(expected, abs=1e-4)
