import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.config import ModelConfig
from mingpt.model import GPT, LossModule, compile_model
from mingpt.model.compile import is_repeatable

EXAMPLE = torch.zeros(2, 8, dtype=torch.long)


def make_loss(dropout: float = 0.0) -> LossModule:
    torch.manual_seed(0)
    config = ModelConfig(arch="modern", n_layer=1, n_head=1, n_embd=8, dropout=dropout)
    return LossModule(GPT(config, vocab_size=5, block_size=8))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_model_that_is_not_compiled_is_repeatable_and_is_left_as_it_was(dropout: float) -> None:
    loss = make_loss(dropout)
    before = [weight.detach().clone() for weight in loss.parameters()]
    assert is_repeatable(loss, loss, EXAMPLE, contextlib.nullcontext)
    for weight, value in zip(loss.parameters(), before, strict=True):
        assert torch.equal(weight, value)
        assert weight.grad is None


@pytest.mark.parametrize("last_right", [2, 5])
def test_a_function_with_other_gradients_at_a_later_call_is_not_repeatable(last_right: int) -> None:
    """Only the gradient of one matrix differs, which is zero in a fresh model."""
    loss, calls = make_loss(), 0
    matrix = loss.get_parameter("model.h.0.attn.c_attn.weight")

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value: Tensor = loss(tokens, targets)
        return value + (calls > last_right) * 1e-4 * (matrix - matrix.detach()).sum()

    assert not is_repeatable(forward, loss, EXAMPLE, contextlib.nullcontext)


def test_without_a_working_compiler_the_model_itself_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no compiler here\nand more that nobody reads")

    monkeypatch.setattr(torch, "compile", broken)
    assert compile_model(make_loss(), EXAMPLE, contextlib.nullcontext, graphs=True) == (None, False)
    assert caplog.messages == ["torch.compile failed (OSError: no compiler here); going on without it"]


@pytest.mark.weekly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_training_uses_what_was_compiled_and_compiles_nothing_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the first batch would be compiled without heartbeats between the ranks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    loss = make_loss()
    forward, _ = compile_model(loss, EXAMPLE, contextlib.nullcontext)
    assert forward is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        for inputs, targets in torch.randint(0, 5, (6, *EXAMPLE.shape)).split(2):
            value = forward(inputs, targets)
            torch.testing.assert_close(value, loss(inputs, targets))
            (value * 0.25).backward()  # type: ignore[no-untyped-call]
            loss.zero_grad(set_to_none=True)
