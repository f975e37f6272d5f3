import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mingpt.config import ModelConfig
from mingpt.model import GPT, can_compile_block, compile_blocks
from mingpt.model.gpt import LossModule

BATCH, LENGTH = 2, 8


def make_model(dropout: float = 0.0) -> GPT:
    torch.manual_seed(0)
    config = ModelConfig(arch="modern", n_layer=2, n_head=1, n_embd=8, dropout=dropout)
    return GPT(config, vocab_size=5, block_size=LENGTH)


def compiles(model: GPT) -> bool:
    return can_compile_block(model, torch.zeros(BATCH, LENGTH, 8), contextlib.nullcontext, torch.float32)


def gradients_of(model: GPT, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss: Tensor = LossModule(model)(tokens, targets)
    loss.backward()  # type: ignore[no-untyped-call]
    return {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_without_a_working_compiler_the_model_itself_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no compiler here\nand more that nobody reads")

    monkeypatch.setattr(torch, "compile", broken)
    assert not compiles(make_model())
    assert caplog.messages == ["torch.compile failed (OSError: no compiler here); going on without it"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("factor", "is_refused"), [(1.0, False), (3.0, True), (torch.nan, True)])
def test_a_compiler_that_computes_something_else_is_not_used(
    factor: float,
    is_refused: bool,
    dropout: float,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With torch 2.13 and g++ 12, AVX-512 code for bfloat16 has wrong gradients if heads have 64 features."""

    def compile_wrongly(compute: Any, **_: Any) -> Any:
        return lambda *arguments: factor * compute(*arguments)

    monkeypatch.setattr(torch, "compile", compile_wrongly)
    assert compiles(make_model(dropout)) is not is_refused
    assert ("a compiled block computes other gradients" in caplog.text) is is_refused


@pytest.mark.weekly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_training_compiles_nothing_again_and_evaluation_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the first batch would be compiled without heartbeats between the ranks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = make_model()
    assert compiles(model)
    batches = torch.randint(0, 5, (3, 2, BATCH, LENGTH))
    expected = [gradients_of(model, *batch) for batch in batches]
    compile_blocks(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, gradients in zip(batches, expected, strict=True):
            torch.testing.assert_close(gradients_of(model, *batch), gradients)
        with torch.no_grad():
            model(torch.zeros(1, 3, dtype=torch.long))
        model.eval()(torch.zeros(3, LENGTH, dtype=torch.long))
