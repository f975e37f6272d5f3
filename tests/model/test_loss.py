from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config import ModelConfig
from mingpt.model import GPT, operations

VOCAB_SIZE, WIDTH, ROWS = 1000, 24, 300


def features() -> tuple[Tensor, Tensor, Tensor]:
    """(N, C) features, (V, C) weights and (N,) targets; one target is the last token of the vocabulary."""
    torch.manual_seed(0)
    targets = torch.randint(0, VOCAB_SIZE, (ROWS,))
    targets[7] = VOCAB_SIZE - 1
    return (
        torch.randn(ROWS, WIDTH, requires_grad=True),
        torch.randn(VOCAB_SIZE, WIDTH, requires_grad=True),
        targets,
    )


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * value, leaves)


class LargestResult(TorchDispatchMode):
    """Records the largest number of elements in the result of an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(self.elements, result.numel() if isinstance(result, Tensor) else 0)
        return result


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
    with torch.no_grad():
        torch.testing.assert_close(operations.chunked_cross_entropy(x, weight, targets), expected)


def test_under_autocast_the_gradient_is_as_exact_as_that_of_torch() -> None:
    x, weight, targets = features()
    exact = gradients(F.cross_entropy(x @ weight.T, targets), x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradients(F.cross_entropy(F.linear(x, weight).float(), targets), x, weight)
        ours = gradients(operations.chunked_cross_entropy(x, weight, targets), x, weight)
    for right, one, other in zip(exact, plain, ours, strict=True):
        assert (other - right).norm() < 1.2 * (one - right).norm()
        assert other.dtype == right.dtype


@pytest.mark.parametrize("training", [True, False])
def test_a_large_vocabulary_never_has_all_its_logits(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(arch="gpt2", n_layer=1, n_head=1, n_embd=32)
    model = GPT(config, vocab_size=2000, block_size=64).train(training)
    tokens = torch.randint(0, 2000, (16, 64))

    def run() -> tuple[Tensor, int]:
        with torch.set_grad_enabled(training), LargestResult() as largest:
            value = model(tokens, tokens)[1]
            if training:
                value.backward()
        return value.detach(), largest.elements

    whole, all_logits = run()
    assert all_logits == tokens.numel() * 2000
    monkeypatch.setattr(operations, "MAX_LOGITS", 128 * 2000)
    value, elements = run()
    assert elements == 128 * 2000
    torch.testing.assert_close(value, whole)
    assert model(tokens, tokens)[0] is None
    assert model(tokens)[0] is not None


def test_chunks_keep_small_gradients_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divided by 20,000 rows, the gradients of most logits would be zero in float16."""
    monkeypatch.setattr(operations, "MAX_LOGITS", 1)
    torch.manual_seed(0)
    x, weight = torch.randn(20_000, 4, requires_grad=True), torch.randn(500, 4, requires_grad=True)
    targets = torch.randint(0, 250, (20_000,))
    expected = gradients(F.cross_entropy(x @ weight.T, targets), weight)[0]
    with torch.autocast("cpu", dtype=torch.float16):
        value = operations.chunked_cross_entropy(x, weight, targets)
    torch.testing.assert_close(gradients(value, weight)[0], expected, rtol=0.02, atol=1e-5)
