import pytest
import torch
from support.single_process import SingleProcess
from torch import Tensor, nn

from mingpt.parallel import ExactReduction, StrategySetup

LEAVES = 6


def make_model() -> nn.Module:
    model = nn.Module()
    model.register_parameter("bias", nn.Parameter(torch.zeros(7)))
    model.register_parameter("weight", nn.Parameter(torch.zeros(2, 3)))
    return model


def make_gradients(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """Of each micro-batch, for each parameter."""
    torch.manual_seed(0)
    return [[torch.randn_like(parameter) for parameter in parameters] for _ in range(LEAVES)]


def make_strategy(grads_are_static: bool = False) -> ExactReduction:
    strategy = ExactReduction(StrategySetup(make_model(), [], [range(LEAVES)], (1, 1), SingleProcess()))
    strategy.prepare(lambda tokens, targets: torch.zeros(()), grads_are_static)
    return strategy


def reduce_step(
    strategy: ExactReduction,
    gradients: list[list[Tensor]],
    memory: list[Tensor] | None = None,
) -> None:
    """One step whose backward passes give these gradients; each of them overwrites `memory`, if given."""
    strategy.start_step()
    for number in strategy.my_micro_batches:
        with strategy.micro_batch(number):
            for place, parameter in enumerate(strategy.parameters):
                gradient = gradients[number][place]
                parameter.grad = gradient.clone() if memory is None else memory[place].copy_(gradient)
    strategy.finish_step()


def sum_of_tree(gradients: list[list[Tensor]]) -> list[Tensor]:
    """((0 + 1) + (2 + 3)) + (4 + 5), for each parameter."""
    return [(a + b + (c + d)) + (e + f) for a, b, c, d, e, f in zip(*gradients, strict=True)]


def equals(strategy: ExactReduction, expected: list[Tensor]) -> bool:
    gradients = strategy.gradients().values()
    return all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


@pytest.mark.parametrize("grads_are_static", [False, True])
def test_gradients_that_the_next_backward_pass_overwrites_are_copied(grads_are_static: bool) -> None:
    """Without the copies the sum is another one, so that this test can fail."""
    strategy = make_strategy(grads_are_static)
    gradients = make_gradients(strategy.parameters)
    memory = [torch.empty_like(parameter) for parameter in strategy.parameters]
    reduce_step(strategy, gradients, memory)
    assert equals(strategy, sum_of_tree(gradients)) == grads_are_static
