"""Which runs are compiled, trainer.compile=auto, and what is done without a compiler that works."""

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.forks import SingleProcess
from support.golden import Golden
from support.models import loss_and_gradients, make_model, make_tokens

from mingpt.base.errors import UserError
from mingpt.config.cli import build
from mingpt.model import GPT, can_compile_block, compile_blocks
from mingpt.model.compile import COMPILING, choose_compile
from mingpt.training.run import compile_on_all_ranks

SHAKESPEARE: dict[str, Any] = {
    "model.arch": "gpt2", "model.n_layer": 6, "model.n_head": 6, "model.n_embd": 384, "data.block_size": 256,
    "trainer.batch_size": 64, "trainer.micro_batch_size": 8,
}  # fmt: skip
FLOPS_PER_TOKEN = 7e7  # about those of SHAKESPEARE
SHORT, LONG = {"trainer.max_steps": 1}, {"trainer.max_steps": 10**8}
RECOMPUTES, UNCOMPILED = {"trainer.recompute": "block"}, {"trainer.compile": False}
Kind = tuple[str, str]  # of a device, and the dtype of matrix products
CPU, MPS = ("cpu", "bfloat16"), ("mps", "float32")
ON_EIGHT = {"trainer.workers": 8, "trainer.parallel": "fsdp", "trainer.micro_batch_size": 4}


def choice_of(settings: dict[str, Any], kind: Kind = CPU, recorded: bool | None = None) -> bool:
    return choose_compile(build(SHAKESPEARE | settings), FLOPS_PER_TOKEN, *kind, recorded)[0]


@pytest.mark.parametrize("others", [{}, ON_EIGHT], ids=["one worker", "eight"])
@pytest.mark.parametrize("kind", [CPU, ("cpu", "float32"), ("cpu", "float16"), ("cuda", "float32")])
def test_auto_compiles_from_a_length_on_whoever_computes(kind: Kind, others: dict[str, Any]) -> None:
    fewest = -int(
        -COMPILING.get(" ".join(kind), COMPILING[kind[0]]).fewest_flops // (256 * 64 * FLOPS_PER_TOKEN)
    )
    found = [choice_of(others | {"trainer.max_steps": steps}, kind) for steps in (0, fewest - 1, fewest)]
    assert found == [False, False, True]


@pytest.mark.parametrize(
    ("settings", "kind", "recorded", "expected"),
    [
        (LONG, MPS, None, False),
        (LONG | RECOMPUTES, CPU, None, False),
        (LONG | UNCOMPILED, CPU, None, False),
        (SHORT | {"trainer.compile": True}, MPS, None, True),
        (SHORT, CPU, True, True),  # a resumed run goes on as its snapshot was computed
        (LONG, CPU, False, False),
        (UNCOMPILED | RECOMPUTES, CPU, True, False),
    ],
)
def test_settings_devices_and_snapshots_for_which_the_length_does_not_count(
    settings: dict[str, Any], kind: Kind, recorded: bool | None, expected: bool
) -> None:
    assert choice_of(settings, kind, recorded) is expected


def test_a_compiled_run_that_is_to_recompute_is_refused_in_one_sentence(golden: Golden) -> None:
    with pytest.raises(UserError) as error:
        choice_of(RECOMPUTES, recorded=True)
    golden(str(error.value))


def compiles(model: GPT) -> bool:
    x = torch.zeros(2, model.block_size, model.config.n_embd)
    return can_compile_block(model, x, contextlib.nullcontext, torch.float32)


def test_without_a_working_compiler_the_model_itself_is_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("no compiler here\nand more that nobody reads")

    monkeypatch.setattr(torch, "compile", broken)
    assert not compiles(make_model("modern"))
    assert caplog.messages == ["torch.compile failed (OSError: no compiler here); going on without it"]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize(("factor", "is_used"), [(1.0, True), (3.0, False), (torch.nan, False)])
def test_a_compiler_that_computes_something_else_is_not_used(
    factor: float, is_used: bool, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With torch 2.13 and g++ 12, AVX-512 code for bfloat16 has wrong gradients if heads have 64 features."""
    monkeypatch.setattr(
        torch, "compile", lambda compute, **_: lambda *arguments: factor * compute(*arguments)
    )
    assert compiles(make_model("modern", dropout=dropout)) is is_used


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_all_blocks_are_compiled_or_none_is(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch, "compile", lambda compute, **_: lambda *arguments: factor * compute(*arguments)
    )
    model, settings = make_model("modern"), {"model.n_embd": 48, "model.n_head": 4, "data.block_size": 24}
    methods = [block.compute for block in model.h]
    assert compile_on_all_ranks(build(settings), SingleProcess(), model) is (factor == 1)
    changed = [block.compute != method for block, method in zip(model.h, methods, strict=True)]
    assert changed == [factor == 1] * len(methods)


@pytest.mark.weekly
@pytest.mark.skipif(not shutil.which("c++"), reason="torch.compile for a CPU needs a C++ compiler")
def test_training_compiles_nothing_again_and_evaluation_compiles_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the first batch would be compiled without heartbeats between the ranks."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, batches = make_model("modern").train(), make_tokens(6).split(2)
    assert compiles(model)
    expected = [loss_and_gradients(model, tokens) for tokens in batches]
    compile_blocks(model)
    with torch.compiler.set_stance("fail_on_recompile"):
        for tokens, gradients in zip(batches, expected, strict=True):
            torch.testing.assert_close(loss_and_gradients(model, tokens), gradients)
        with torch.no_grad():
            model(make_tokens(1, 3))
        model.eval()(make_tokens(3))
