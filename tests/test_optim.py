from typing import Literal

import pytest
import torch
from torch import nn

from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.model import GPT
from mingpt.optim import Optimizer, learning_rate


def test_the_learning_rate_rises_and_falls_as_told() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, min_lr_fraction=0.1)
    rates = [learning_rate(step, config, 100) for step in range(1, 101)]
    assert rates[0] == pytest.approx(1 / 11) and rates[9] == pytest.approx(10 / 11) and max(rates) == rates[10] < 1
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.1) and rates[54] == pytest.approx(0.55, abs=1e-9)


@pytest.mark.parametrize(("max_steps", "warmup"), [(1, 0), (1, 5), (5, 5), (5, 100)])
def test_no_length_of_run_upsets_the_schedule(max_steps: int, warmup: int) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=warmup)
    assert all(0 < learning_rate(step, config, max_steps) <= 1 or step == max_steps for step in range(1, max_steps + 1))


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        tokens = torch.randint(0, 11, (2, 9))
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        optimizer.step(0.01)
        optimizer.zero_grad()


def build(name: Literal["adamw", "muon"], arch: Literal["gpt2", "modern"]) -> tuple[GPT, Optimizer]:
    torch.manual_seed(0)
    model = GPT(ModelConfig(arch=arch, n_layer=2, n_head=2, n_embd=16), vocab_size=11, block_size=8)
    return model, Optimizer(model, OptimizerConfig(name=name))


@pytest.mark.parametrize("arch", ["gpt2", "modern"])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_taken_over_goes_on_with_the_same_bits(name: Literal["adamw", "muon"], arch: Literal["gpt2", "modern"]) -> None:
    whole, optimizer = build(name, arch)
    train(whole, optimizer, range(6))
    first, optimizer = build(name, arch)
    train(first, optimizer, range(3))
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    second, optimizer = build(name, arch)
    second.load_state_dict(first.state_dict())
    optimizer.load_state_dict(state)
    train(second, optimizer, range(3, 6))
    assert all(torch.equal(one, two) for one, two in zip(whole.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_parameter_has_one_optimizer_and_vectors_do_not_decay(name: Literal["adamw", "muon"]) -> None:
    model, optimizer = build(name, "gpt2")
    groups = [group for part in optimizer.parts for group in part.param_groups]
    members = [id(weight) for group in groups for weight in group["params"]]
    assert sorted(members) == sorted(id(weight) for weight in model.parameters())
    assert all((group["weight_decay"] > 0) == (weight.ndim >= 2) for group in groups for weight in group["params"])
    assert (len(optimizer.parts) == 2) == (name == "muon")
