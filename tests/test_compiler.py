import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt import compiler
from mingpt.config import ModelConfig
from mingpt.model import GPT

EXAMPLE = torch.zeros(2, 8, dtype=torch.long)


def model(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    return GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=1, n_embd=8, dropout=dropout), vocab_size=5, block_size=8)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_model_as_it_is_repeats_itself_and_is_left_without_gradients(dropout: float) -> None:
    network = model(dropout)
    assert compiler.repeatable(network, network, EXAMPLE, contextlib.nullcontext, rounds=3)
    assert all(weight.grad is None for weight in network.parameters())


@pytest.mark.parametrize("wrong_from", [2, 5])
def test_one_that_computes_something_else_later_on_is_found_out(wrong_from: int) -> None:
    network, calls = model(), 0

    def forward(*tokens: Tensor) -> tuple[Any, Tensor]:
        nonlocal calls
        calls += 1
        loss: Tensor = network(*tokens)[1]
        return None, loss * (1 + 1e-6 * (calls > wrong_from))

    assert not compiler.repeatable(forward, network, EXAMPLE, contextlib.nullcontext, rounds=3)


def test_without_a_working_compiler_the_model_itself_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no compiler here\nand more that nobody reads")

    monkeypatch.setattr(torch, "compile", broken)
    network = model()
    assert compiler.compiled(network, EXAMPLE, contextlib.nullcontext, graphs=True) == (network, False)
    assert [record.getMessage() for record in caplog.records] == ["torch.compile failed (OSError: no compiler here); going on without it"]
