from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt.config import ModelConfig
from mingpt.model import GPT, operations

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
