"""A model computed in other ways: by torch's own operations, for a compiler, with recomputed activations."""

import pytest
import torch
from support.models import ARCHITECTURES, Arch, loss_and_gradients, make_model, make_tokens

from mingpt.base import extras
from mingpt.config import ModelConfig
from mingpt.extras.cpu_ops import MAX_MATH_ATTENTION
from mingpt.model import GPT, operations
from mingpt.model.gpt import Dropout


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_without_the_module_of_the_table_a_model_computes_the_same_up_to_rounding(
    arch: Arch, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = loss_and_gradients(make_model(arch), make_tokens(), dtype)
    monkeypatch.setitem(operations.OPERATIONS, "cpu", "mingpt.extras.no_such_extra:cpu_operations")
    monkeypatch.setattr(operations, "loaded", {})
    monkeypatch.setattr(extras, "missing", [])
    found = loss_and_gradients(make_model(arch), make_tokens(), dtype)
    pairs = zip(found, expected, strict=True)
    assert 0 < max(float((one - other).norm() / other.norm()) for one, other in pairs) < tolerance


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_what_a_compiler_is_given_for_the_cpu_computes_the_same(
    arch: Arch, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = loss_and_gradients(make_model(arch), make_tokens())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    found = loss_and_gradients(make_model(arch), make_tokens())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length", [40, MAX_MATH_ATTENTION + 8])  # attention written out, and the library's
def test_activations_are_computed_again_with_the_same_bits(
    arch: Arch, dtype: torch.dtype, length: int
) -> None:
    model, tokens = make_model(arch, block_size=length, dropout=0.2).train(), make_tokens(1, length)
    kept = loss_and_gradients(model, tokens, dtype)
    model.set_recompute(True)
    calls: list[object] = []
    for block in model.h:
        block.mlp.register_forward_hook(lambda *_: calls.append(_))
    recomputed = loss_and_gradients(model, tokens, dtype)
    assert len(calls) == 2 * len(model.h)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


def test_operations_are_imported_when_a_model_gets_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """An import at the first call would break the graph of torch.compile; no call is made on meta."""
    monkeypatch.setattr(operations, "loaded", {})
    with torch.device("meta"):
        model = GPT(ModelConfig(n_layer=1, n_head=1, n_embd=2), vocab_size=2, block_size=2)
    assert not operations.loaded
    model.to_empty(device="cpu").init_buffers()
    assert list(operations.loaded) == ["cpu"]


@pytest.mark.parametrize("compiling", [False, True])
def test_dropout_drops_in_training_alone(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer, x = Dropout(0.25), torch.ones(400, 500)
    torch.manual_seed(6)
    dropped = layer(x)
    assert 0.248 < float((dropped == 0).float().mean()) < 0.252
    assert torch.equal(dropped[dropped != 0].unique(), torch.tensor([4 / 3]))
    assert torch.equal(layer.eval()(x), x)
