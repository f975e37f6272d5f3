"""A model computed in other ways: by torch's own operations, for a compiler, with activations computed again,
and its loss in chunks.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.models import ARCHITECTURES, Arch, loss_and_gradients, make_model, make_tokens
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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
    largest = max(float((one - other).norm() / other.norm()) for one, other in pairs)
    has_own = arch == "modern" or dtype == torch.bfloat16
    assert largest < tolerance and (largest > 0) == has_own


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
        block.get_submodule("mlp").register_forward_hook(lambda *_: calls.append(_))
    recomputed = loss_and_gradients(model, tokens, dtype)
    assert len(calls) == 2 * len(model.h)
    assert all(torch.equal(one, other) for one, other in zip(kept, recomputed, strict=True))


@pytest.mark.parametrize("compiling", [False, True])
def test_dropout_drops_in_training_alone(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    layer, x = Dropout(0.25), torch.ones(400, 500)
    torch.manual_seed(6)
    dropped = layer(x)
    assert 0.248 < float((dropped == 0).float().mean()) < 0.252
    assert torch.equal(dropped[dropped != 0].unique(), torch.tensor([4 / 3]))
    assert torch.equal(layer.eval()(x), x)


VOCAB_SIZE = 1000


def features(rows: int = 300, width: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """(N, C) features, (V, C) weights and (N,) targets; one target is the last token of the vocabulary."""
    torch.manual_seed(0)
    targets = torch.randint(0, VOCAB_SIZE // 2, (rows,))
    targets[7] = VOCAB_SIZE - 1
    x, weight = torch.randn(rows, width), torch.randn(VOCAB_SIZE, width)
    return x.requires_grad_(), weight.requires_grad_(), targets


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * value, leaves)


@pytest.mark.parametrize("padded", [0, 24])
@pytest.mark.parametrize("max_logits", [1 << 26, 128 * VOCAB_SIZE, 1])
def test_chunks_have_the_loss_and_the_gradient_of_the_whole(
    padded: int, max_logits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "MAX_LOGITS", max_logits)
    monkeypatch.setattr(operations, "padding", lambda _: padded)
    x, weight, targets = features()
    torch.testing.assert_close(operations.head_logits(x, weight), x @ weight.T)
    expected = F.cross_entropy(x @ weight.T, targets)
    value = operations.chunked_cross_entropy(x, weight, targets)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients(value, x, weight), gradients(expected, x, weight))


@pytest.mark.parametrize(
    ("dtype", "rows", "tolerance"), [(torch.bfloat16, 300, 0.01), (torch.float16, 20_000, 0.002)]
)
def test_under_autocast_the_gradient_is_exact_up_to_the_rounding_of_the_type(
    dtype: torch.dtype, rows: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Divided by 20,000 rows, the gradients of most logits would be zero in float16."""
    monkeypatch.setattr(operations, "MAX_LOGITS", 1)
    x, weight, targets = features(rows, 4)
    exact = gradients(F.cross_entropy(F.linear(x, weight), targets), x, weight)
    with torch.autocast("cpu", dtype=dtype):
        found = gradients(operations.chunked_cross_entropy(x, weight, targets), x, weight)
    for one, other in zip(found, exact, strict=True):
        assert one.dtype == other.dtype and (one - other).norm() < tolerance * other.norm()


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements in the result of an operation."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
        return result


@pytest.mark.parametrize("training", [True, False])
def test_a_large_vocabulary_never_has_all_its_logits(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(arch="gpt2", n_layer=1, n_head=1, n_embd=32)
    model = GPT(config, vocab_size=2000, block_size=64).train(training)
    tokens, losses = torch.randint(0, 2000, (16, 64)), []
    for limit in (1024 * 2000, 128 * 2000):
        monkeypatch.setattr(operations, "MAX_LOGITS", limit)
        with torch.set_grad_enabled(training), LargestResult() as largest:
            logits, loss = model(tokens, tokens)
            if training:
                loss.backward()
        assert largest.elements == limit and (logits is None) == (limit < 1024 * 2000)
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
