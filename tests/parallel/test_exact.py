from collections.abc import Sequence

import torch
from support.single_process import SingleProcess
from torch import Tensor, nn

from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.parallel.ddp import BUCKET_BYTES, make_buckets
from mingpt.parallel.exact import naive_sum
from mingpt.parallel.strategy import allocate

LEAVES = 6


def make_model() -> nn.Module:
    model = nn.Module()
    model.register_parameter("bias", nn.Parameter(torch.zeros(7)))
    model.register_parameter("weight", nn.Parameter(torch.zeros(2, 3)))
    return model


def make_gradients(parameters: Sequence[Tensor]) -> list[list[Tensor]]:
    """The gradients of each micro-batch, for each parameter."""
    torch.manual_seed(0)
    return [[torch.randn_like(parameter) for parameter in parameters] for _ in range(LEAVES)]


def test_gradients_are_summed_along_the_tree() -> None:
    strategy = ExactReduction(StrategySetup(make_model(), [range(LEAVES)], SingleProcess()))
    strategy.prepare(lambda tokens, targets: torch.zeros(()))
    parameters = list(strategy.weights.values())
    gradients = make_gradients(parameters)
    expected = [
        naive_sum(list(of_parameter), strategy.context) for of_parameter in zip(*gradients, strict=True)
    ]
    for _ in range(2):  # the second step keeps nothing of the first
        strategy.start_step()
        for number in strategy.my_micro_batches:
            with strategy.micro_batch(number):
                for place, parameter in enumerate(parameters):
                    parameter.grad = gradients[number][place].clone()
        strategy.finish_step()
        found = strategy.gradients().values()
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        strategy.finish_update()


def names_of(elements: list[int]) -> list[list[str]]:
    return make_buckets(
        {str(number): torch.empty(size, device="meta") for number, size in enumerate(elements)}
    )


def test_buckets_go_from_the_last_parameter_to_the_first() -> None:
    full = BUCKET_BYTES // 4
    assert names_of([3, full, 5, full // 2, full // 2, 7]) == [["5", "4", "3"], ["2", "1"], ["0"]]


def test_what_has_memory_keeps_it() -> None:
    model = nn.Linear(3, 2)
    weight, value = model.weight, model.weight.detach().clone()
    allocate(model, torch.device("cpu"))
    assert model.weight is weight and torch.equal(weight, value)
