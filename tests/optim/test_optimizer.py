from itertools import pairwise

import pytest
import torch
from support.training import ARCHITECTURES, NAMES, Arch, Name, compute_gradients, gradients_of, make_model

from mingpt.config import OptimizerConfig
from mingpt.optim import state_shapes
from mingpt.optim.optimizer import SCHEDULES, learning_rate


@pytest.mark.parametrize(("name", "by_muon", "tolerance"), [("adamw", 0, 0.0), ("muon", 8, 2e-3)])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_updates_are_those_of_torch(arch: Arch, name: Name, by_muon: int, tolerance: float) -> None:
    """AdamW's have torch's bits, with decay for matrices alone; sizes are multiples of 16 elements.

    Muon updates the matrices of the blocks, and AdamW the rest. Muon's updates agree as far as torch's
    products of single matrices and our products of a batch agree in bfloat16.
    """
    model, optimizer = make_model(name, arch)
    theirs, _ = make_model(name, arch)
    config = OptimizerConfig(name=name)
    named = dict(theirs.named_parameters())
    hidden = {
        key: weight
        for key, weight in named.items()
        if name == "muon" and key.startswith("h.") and weight.ndim == 2
    }
    assert len(hidden) == by_muon
    rest = [weight for key, weight in named.items() if key not in hidden]
    groups = [
        {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(config.beta1, config.beta2), fused=True)
    references: list[torch.optim.Optimizer] = [adamw]
    if hidden:
        muon = torch.optim.Muon(
            list(hidden.values()),
            lr=0.01,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            adjust_lr_fn="match_rms_adamw",
        )
        references.append(muon)
    for step in range(4):
        compute_gradients(model, step)
        compute_gradients(theirs, step)
        optimizer.step(0.01, gradients_of(model))
        for reference in references:
            reference.step()
        model.zero_grad()
        theirs.zero_grad()
    for key, mine in model.named_parameters():
        torch.testing.assert_close(mine, named[key], rtol=0, atol=tolerance, msg=key)


@pytest.mark.parametrize(
    ("name", "states"), [("adamw", {"step", "exp_avg", "exp_avg_sq"}), ("muon", {"momentum_buffer"})]
)
def test_the_state_is_named_after_the_parameters(name: Name, states: set[str]) -> None:
    model, optimizer = make_model(name, "modern")
    state = optimizer.state_dict()
    matrix = "h.0.attn.c_attn.weight"
    assert {key.removeprefix(matrix + ".") for key in state if key.startswith(matrix)} == states
    assert {key.rpartition(".")[0] for key in state} == {key for key, _ in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_shapes_of_the_state_are_known_without_the_optimizer(name: Name, arch: Arch) -> None:
    model, optimizer = make_model(name, arch)
    parameters = {key: tuple(weight.shape) for key, weight in model.named_parameters()}
    expected = {key: tuple(tensor.shape) for key, tensor in optimizer.state_dict().items()}
    assert state_shapes(parameters, OptimizerConfig(name=name)) == expected


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_learning_rate_rises_and_falls_between_the_values_of_the_configuration(schedule: str) -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=10,
        min_lr_fraction=0.1,
        schedule=schedule,  # type: ignore[arg-type]
    )
    rates = [learning_rate(step, config, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[9] == pytest.approx(10 / 11)
    assert max(rates) == rates[10] < 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55, abs=1e-9)  # half-way, where both schedules meet


def test_the_linear_schedule_falls_by_the_same_amount_at_each_step() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, min_lr_fraction=0.2, schedule="linear")
    rates = [learning_rate(step, config, 8) for step in range(1, 9)]
    assert rates == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])


def test_the_cosine_schedule_falls_most_slowly_at_both_ends() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=0, min_lr_fraction=0.0)
    rates = [learning_rate(step, config, 8) for step in range(1, 9)]
    falls = [before - after for before, after in pairwise(rates)]
    assert falls.index(max(falls)) in (2, 3)
    assert falls[-1] == min(falls)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 5), (5, 5), (5, 100)])
def test_no_length_of_run_upsets_the_schedule(schedule: str, max_steps: int, warmup: int) -> None:
    config = OptimizerConfig(
        learning_rate=1.0,
        warmup_steps=warmup,
        schedule=schedule,  # type: ignore[arg-type]
    )
    for step in range(1, max_steps + 1):
        assert 0 < learning_rate(step, config, max_steps) <= 1 or step == max_steps
