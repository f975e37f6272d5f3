from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mingpt import loss
from mingpt.config import ModelConfig
from mingpt.model import GPT

VOCABULARY, WIDTH, ROWS = 1000, 24, 300


def features() -> tuple[Tensor, Tensor, Tensor]:
    """(N, C), (V, C) and (N,) targets, the last token of the vocabulary among them."""
    torch.manual_seed(0)
    targets = torch.randint(0, VOCABULARY, (ROWS,))
    targets[7] = VOCABULARY - 1
    return torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(VOCABULARY, WIDTH, requires_grad=True), targets


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(3.0 * value, leaves)


class Largest(TorchDispatchMode):
    """The most numbers that any operation's result has had."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numbers = max(self.numbers, result.numel() if isinstance(result, Tensor) else 0)
        return result


@pytest.mark.parametrize("padded", [0, 24])
@pytest.mark.parametrize("at_once", [1 << 26, 128 * VOCABULARY, 1])
def test_chunks_have_the_loss_and_the_gradient_of_the_whole(padded: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "AT_ONCE", at_once)
    monkeypatch.setattr(loss, "padding", lambda _: padded)
    x, weight, targets = features()
    expected = F.cross_entropy(x @ weight.T, targets)
    value = loss.chunked_cross_entropy(x, weight, targets)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(gradients(value, x, weight), gradients(expected, x, weight))
    with torch.no_grad():
        torch.testing.assert_close(loss.chunked_cross_entropy(x, weight, targets), expected)


def test_under_autocast_it_is_as_near_as_the_plain_one() -> None:
    x, weight, targets = features()
    exact = gradients(F.cross_entropy(x @ weight.T, targets), x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = gradients(F.cross_entropy(F.linear(x, weight).float(), targets), x, weight)
        ours = gradients(loss.chunked_cross_entropy(x, weight, targets), x, weight)
    for right, one, other in zip(exact, plain, ours, strict=True):
        assert (other - right).norm() < 1.2 * (one - right).norm() and other.dtype == right.dtype


def test_padding_changes_no_logit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = features()
    expected = loss.logits(x, weight)
    monkeypatch.setattr(loss, "padding", lambda _: 24)
    padded = loss.logits(x, weight)
    torch.testing.assert_close(padded, expected)
    torch.testing.assert_close(gradients(padded.sum(), x, weight), gradients(expected.sum(), x, weight))


@pytest.mark.parametrize("training", [True, False])
def test_a_large_vocabulary_never_has_all_its_logits(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=1, n_embd=32), vocab_size=2000, block_size=64).train(training)
    tokens = torch.randint(0, 2000, (16, 64))

    def run() -> tuple[Tensor, int]:
        with torch.set_grad_enabled(training), Largest() as largest:
            value = model(tokens, tokens)[1]
            if training:
                value.backward()
        return value.detach(), largest.numbers

    whole, all_logits = run()
    expected = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    assert all_logits == tokens.numel() * 2000
    model.zero_grad()
    monkeypatch.setattr(loss, "AT_ONCE", 128 * 2000)
    value, numbers = run()
    assert numbers == 128 * 2000 and model(tokens, tokens)[0] is None and model(tokens)[0] is not None
    torch.testing.assert_close(value, whole)
    torch.testing.assert_close([weight.grad for weight in model.parameters() if weight.grad is not None], expected)
