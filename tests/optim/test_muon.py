from typing import Literal

import pytest
import torch
from torch import nn

from mingpt.config import ModelConfig, OptimizerConfig
from mingpt.model import GPT
from mingpt.optim import Muon, Optimizer, Share, learning_rate


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
@pytest.mark.parametrize("arch", ["gpt2", "modern"])
def test_the_updates_are_those_of_torch_optim(name: Literal["adamw", "muon"], arch: Literal["gpt2", "modern"]) -> None:
    """AdamW to the bit, with decay for matrices alone; Muon as far as bfloat16 products in batches and one by one agree."""
    model, optimizer = build(name, arch)
    theirs, _ = build(name, arch)
    config = OptimizerConfig(name=name)
    hidden = [weight for key, weight in theirs.named_parameters() if name == "muon" and key.startswith("h.") and weight.ndim == 2]
    rest = [weight for weight in theirs.parameters() if not any(weight is matrix for matrix in hidden)]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            [
                {"params": [weight for weight in rest if weight.ndim >= 2], "weight_decay": config.weight_decay},
                {"params": [weight for weight in rest if weight.ndim < 2], "weight_decay": 0.0},
            ],
            lr=0.01, betas=(config.beta1, config.beta2), fused=True,
        )
    ]  # fmt: skip
    if hidden:
        parts.append(torch.optim.Muon(hidden, lr=0.01, weight_decay=config.weight_decay, momentum=config.momentum, adjust_lr_fn="match_rms_adamw"))
    for step in range(4):
        for one in (model, theirs):
            torch.manual_seed(step)
            tokens = torch.randint(0, 11, (2, 9))
            one(tokens[:, :-1], tokens[:, 1:])[1].backward()
        optimizer.step(0.01)
        for part in parts:
            part.step()
        optimizer.zero_grad()
        theirs.zero_grad()
    for (key, mine), (_, other) in zip(model.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0 if name == "adamw" else 2e-3, msg=key)


def muon(matrices: list[torch.Tensor], rank: int, workers: int, share: Share) -> list[torch.Tensor]:
    """The matrices after one update, by a worker whose gradients are the matrices' squares."""
    weights = {f"h.{number}": nn.Parameter(matrix.clone()) for number, matrix in enumerate(matrices)}
    for weight in weights.values():
        weight.grad = weight.detach().square()
    Muon(weights, OptimizerConfig(), rank, workers, share).step(0.01)
    return [weight.detach() for weight in weights.values()]


def test_the_work_dealt_to_several_workers_gives_the_bits_of_one() -> None:
    torch.manual_seed(0)
    matrices = [torch.randn(shape) for shape in ((8, 24), (24, 8), (8, 8), (8, 24), (8, 24), (16, 8), (8, 24))]
    alone = muon(matrices, 0, 1, lambda row: row.unsqueeze(0))
    for workers in (2, 3, 9):
        rows: list[torch.Tensor] = []

        def keep(row: torch.Tensor, rows: list[torch.Tensor] = rows, workers: int = workers) -> torch.Tensor:
            rows.append(row)
            return torch.zeros(workers, len(row))

        for rank in range(workers):
            muon(matrices, rank, workers, keep)
        together = muon(matrices, 0, workers, lambda _, rows=rows: torch.stack(rows))  # type: ignore[misc]
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
