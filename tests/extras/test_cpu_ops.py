"""The CPU's operations have the values of torch's, forward and backward, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mingpt.extras.cpu_ops import CHUNK, CPU, ROWS
from mingpt.model.operations import EPSILON, PositionTables


def gradients(outcome: Tensor, inputs: Tensor) -> Tensor:
    weights = torch.linspace(-1, 1, outcome.numel(), dtype=outcome.dtype).view(outcome.shape)
    (gradient,) = torch.autograd.grad(outcome, inputs, weights)
    return gradient


def assert_same(mine: Tensor, plain: Tensor, inputs: Tensor) -> None:
    torch.testing.assert_close(mine, plain, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients(mine, inputs), gradients(plain, inputs), rtol=1e-8, atol=1e-8)


def test_the_norm_and_the_activation_are_those_of_torch() -> None:
    x = torch.randn(2, 5, 24, dtype=torch.float64, requires_grad=True)
    assert_same(CPU.rms_norm(x), F.rms_norm(x, (24,), eps=EPSILON), x)
    assert_same(CPU.squared_relu(x), F.relu(x).square(), x)


@pytest.mark.parametrize("length", [1, 7, ROWS, ROWS + 3, 2 * ROWS + 1])
@pytest.mark.parametrize("modern", [False, True])
def test_attention_is_the_product_of_softmax_and_values(length: int, modern: bool) -> None:
    """The lengths are one block of rows, a part of one, and several blocks."""
    torch.manual_seed(1)
    heads, size = 2, 6
    qkv = torch.randn(2, length, 3 * heads * size, dtype=torch.float64, requires_grad=True)
    positions = PositionTables(length, size if modern else 0)()
    mask = torch.full((length, length), float("-inf"), dtype=torch.float64).triu(1)
    query, key, value = qkv.view(2, length, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
    if modern:
        query, key = (positions.rotate(F.rms_norm(part, (size,), eps=EPSILON), 0) for part in (query, key))
    weights = torch.softmax(query @ key.mT / math.sqrt(size) + mask, -1)
    plain = (weights @ value).transpose(1, 2).reshape(2, length, heads * size)
    assert_same(CPU.attention(qkv, heads, positions, 0.0), plain, qkv)


def test_attention_with_dropout_has_the_gradient_of_what_it_computed() -> None:
    """The gradient is compared with finite differences under the same mask."""
    torch.manual_seed(2)
    qkv = torch.randn(1, 4, 12, dtype=torch.float64, requires_grad=True)
    positions = PositionTables(4)()

    def with_same_mask(qkv: Tensor) -> Tensor:
        torch.manual_seed(3)
        return CPU.attention(qkv, 2, positions, 0.3)

    assert torch.autograd.gradcheck(with_same_mask, (qkv,))
    assert not torch.equal(with_same_mask(qkv), CPU.attention(qkv, 2, positions, 0.0))


@pytest.mark.parametrize("probability", [0.1, 0.2, 0.5])
def test_dropout_drops_its_part_everywhere_and_keeps_the_mean(probability: float) -> None:
    """This holds at each of the eight places that are drawn at once; the mask follows torch's seed."""
    torch.manual_seed(4)
    x = torch.ones(1 << 20, requires_grad=True)
    y = CPU.dropout(x, probability)
    dropped = (y == 0).float().view(-1, 8).mean(0)
    torch.testing.assert_close(dropped, torch.full((8,), round(256 * probability) / 256), rtol=0, atol=5e-3)
    assert abs(float(y.detach().mean()) - 1) < 3e-3
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y.detach())
    torch.manual_seed(4)
    again, other = CPU.dropout(x, probability), CPU.dropout(x, probability)
    assert torch.equal(again, y) and not torch.equal(other, y)
    assert CPU.dropout(x, 0.0) is x


def test_gelu_of_every_bfloat16_number_is_the_nearest_to_the_exact_one() -> None:
    """In more numbers than a chunk has, and in another layout than theirs in memory."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    finite = numbers[numbers.isfinite()]
    x = finite.repeat(2 * CHUNK // len(finite), 1).mT.requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = CPU.gelu(x), F.gelu(exact, approximate="tanh")
    assert torch.equal(y, expected.bfloat16())
    slopes, exact_slopes = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), exact)[0]
    assert torch.equal(slopes, exact_slopes.bfloat16())
    exact_nan = F.gelu(numbers.double(), approximate="tanh").isnan()
    assert torch.equal(CPU.gelu(numbers).isnan(), exact_nan)
    assert CPU.gelu(finite.float()).dtype == torch.float32
