import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt import compiler
from mingpt.config import ModelConfig
from mingpt.model import GPT, Loss

EXAMPLE = torch.zeros(2, 8, dtype=torch.long)


def model(dropout: float = 0.0) -> Loss:
    torch.manual_seed(0)
    return Loss(GPT(ModelConfig(arch="modern", n_layer=1, n_head=1, n_embd=8, dropout=dropout), vocab_size=5, block_size=8))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_model_as_it_is_repeats_itself_and_is_left_as_it_was(dropout: float) -> None:
    loss = model(dropout)
    before = [weight.detach().clone() for weight in loss.parameters()]
    assert compiler.repeatable(loss, loss, EXAMPLE, contextlib.nullcontext)
    assert all(torch.equal(weight, value) and weight.grad is None for weight, value in zip(loss.parameters(), before, strict=True))


@pytest.mark.parametrize("wrong_from", [2, 5])
def test_one_that_computes_something_else_later_on_is_found_out(wrong_from: int) -> None:
    """Here in the gradient of one matrix alone, which is zero in a fresh model."""
    loss, calls = model(), 0
    matrix = loss.get_parameter("model.h.0.attn.c_attn.weight")

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        value: Tensor = loss(tokens, targets)
        return value + (calls > wrong_from) * 1e-4 * (matrix - matrix.detach()).sum()

    assert not compiler.repeatable(forward, loss, EXAMPLE, contextlib.nullcontext)


def test_without_a_working_compiler_the_model_itself_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no compiler here\nand more that nobody reads")

    monkeypatch.setattr(torch, "compile", broken)
    assert compiler.compiled(model(), EXAMPLE, contextlib.nullcontext, graphs=True) == (None, False)
    assert [record.getMessage() for record in caplog.records] == ["torch.compile failed (OSError: no compiler here); going on without it"]


@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_training_computes_what_was_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is compiled again, outside of what watches over a compiler, when the first batch comes."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    loss = model()
    forward, _ = compiler.compiled(loss, EXAMPLE, contextlib.nullcontext)
    assert forward is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch in torch.randint(0, 5, (6, *EXAMPLE.shape)).split(2):
            inputs, targets = batch
            value = forward(inputs, targets)
            torch.testing.assert_close(value, loss(inputs, targets))
            (value * 0.25).backward()  # type: ignore[no-untyped-call]
            loss.zero_grad(set_to_none=True)
