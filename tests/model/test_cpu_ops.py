"""Each kernel against the plain expression that it stands for, forward and backward, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt import kernels
from mingpt.model import Rotary


def gradients(outcome: Tensor, inputs: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(outcome, inputs, torch.linspace(-1, 1, outcome.numel(), dtype=outcome.dtype).view(outcome.shape))
    return gradient


def same(mine: Tensor, plain: Tensor, inputs: Tensor) -> None:
    torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(mine, inputs), gradients(plain, inputs), rtol=1e-8, atol=1e-8)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)


def test_rms_norm(x: Tensor) -> None:
    same(kernels.rms_norm(x), F.rms_norm(x, (24,), eps=kernels.EPSILON), x)


def test_squared_relu(x: Tensor) -> None:
    same(kernels.squared_relu(x), F.relu(x).square(), x)


@pytest.mark.parametrize("length", [1, 7, kernels.ROWS, kernels.ROWS + 3, 2 * kernels.ROWS + 1])
@pytest.mark.parametrize("modern", [False, True])
def test_attention(length: int, modern: bool) -> None:
    """Lengths of one block of rows, of a part of one, and across several."""
    torch.manual_seed(1)
    heads, size = 2, 6
    qkv = torch.randn(2, length, 3 * heads * size, dtype=torch.float64, requires_grad=True)
    rotary = Rotary(size, length)
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    query, key, value = qkv.view(2, length, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    if modern:
        query, key = (rotary(F.rms_norm(part, (size,), eps=kernels.EPSILON), 0) for part in (query, key))
    plain = (torch.softmax(query @ key.mT / math.sqrt(size) + mask, -1) @ value).transpose(1, 2).reshape(2, length, heads * size)
    same(kernels.attention(qkv, heads, mask, rotary.cos if modern else None, rotary.sin if modern else None, 0.0), plain, qkv)


def test_attention_with_dropout_has_the_gradient_of_what_it_computed() -> None:
    """By finite differences, with the same draws each time."""
    torch.manual_seed(2)
    qkv = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    mask = torch.full((4, 4), float("-inf"), dtype=torch.float64).triu(1)

    def drawn_alike(qkv: Tensor) -> Tensor:
        torch.manual_seed(3)
        return kernels.attention(qkv, 2, mask, None, None, 0.3)

    assert torch.autograd.gradcheck(drawn_alike, (qkv,))
    assert not torch.equal(drawn_alike(qkv), kernels.attention(qkv, 2, mask, None, None, 0.0))


@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5])
def test_dropout_keeps_its_share_everywhere_and_the_mean(probability: float) -> None:
    """Each place among the eight that are drawn at once; the draws follow torch's seed."""
    torch.manual_seed(4)
    x = torch.ones(1 << 20, requires_grad=True)
    y = kernels.dropout(x, probability)
    share = (y == 0).float().view(-1, 8).mean(0)
    torch.testing.assert_close(share, torch.full((8,), round(256 * probability) / 256), rtol=0, atol=5e-3)
    assert abs(float(y.detach().mean()) - 1) < 3e-3
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    torch.manual_seed(4)
    assert torch.equal(kernels.dropout(x, probability), y) and not torch.equal(kernels.dropout(x, probability), y)
    assert kernels.dropout(x, 0.0) is x
