import pytest
import torch
from support.single_process import SingleProcess
from torch import Tensor, nn

from mingpt import events
from mingpt.parallel import ExactReduction, StrategySetup
from mingpt.parallel.exact import BUCKET_BYTES, make_buckets

LEAVES = 6


def make_parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2, 3))]


def make_gradients(parameters: list[nn.Parameter]) -> list[list[Tensor]]:
    """Of each micro-batch, for each parameter."""
    torch.manual_seed(0)
    return [[torch.randn_like(parameter) for parameter in parameters] for _ in range(LEAVES)]


def make_strategy(parameters: list[nn.Parameter], grads_are_static: bool = False) -> ExactReduction:
    setup = StrategySetup(None, parameters, [range(LEAVES)], (1, 1), SingleProcess(), grads_are_static)
    return ExactReduction(setup)


def reduce_step(
    strategy: ExactReduction,
    parameters: list[nn.Parameter],
    gradients: list[list[Tensor]],
    memory: list[Tensor] | None = None,
) -> None:
    """One step whose backward passes give these gradients; each of them overwrites `memory`, if given."""
    strategy.start_step()
    for number in strategy.my_micro_batches:
        with strategy.micro_batch(number):
            for place, parameter in enumerate(parameters):
                gradient = gradients[number][place]
                parameter.grad = gradient.clone() if memory is None else memory[place].copy_(gradient)
    strategy.finish_step()


def sum_of_tree(gradients: list[list[Tensor]]) -> list[Tensor]:
    """((0 + 1) + (2 + 3)) + (4 + 5), for each parameter."""
    return [(a + b + (c + d)) + (e + f) for a, b, c, d, e, f in zip(*gradients, strict=True)]


def equals(parameters: list[nn.Parameter], expected: list[Tensor]) -> bool:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert len(gradients) == len(expected)
    return all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))


def test_the_gradient_of_a_step_is_the_sum_along_the_tree() -> None:
    parameters = make_parameters()
    gradients = make_gradients(parameters)
    strategy = make_strategy(parameters)
    for _ in range(2):  # nothing is left of the step before
        reduce_step(strategy, parameters, gradients)
        assert equals(parameters, sum_of_tree(gradients))


@pytest.mark.parametrize("grads_are_static", [False, True])
def test_gradients_that_the_next_backward_pass_overwrites_are_copied(grads_are_static: bool) -> None:
    """Without the copies the sum is another one, so that this test can fail."""
    parameters = make_parameters()
    gradients = make_gradients(parameters)
    memory = [torch.empty_like(parameter) for parameter in parameters]
    reduce_step(make_strategy(parameters, grads_are_static), parameters, gradients, memory)
    assert equals(parameters, sum_of_tree(gradients)) == grads_are_static


def test_the_partial_sums_are_those_of_a_binary_counter() -> None:
    held: list[list[tuple[int, int]]] = []

    def note(micro_batch: int, sums: list[tuple[int, int, list[Tensor]]]) -> None:
        held.append([(level, index) for level, index, _ in sums])

    events.subscribe("partial_sums", note)
    parameters = make_parameters()
    reduce_step(make_strategy(parameters), parameters, make_gradients(parameters))
    assert held == [
        [(0, 0)],
        [(1, 0)],
        [(1, 0), (0, 2)],
        [(2, 0)],
        [(2, 0), (0, 4)],
        [(3, 0)],
    ]


@pytest.mark.parametrize(("max_norm", "clipped"), [(0.5, 0.5), (1000.0, None), (0.0, None)])
def test_the_norm_before_clipping_is_returned(max_norm: float, clipped: float | None) -> None:
    parameters = make_parameters()
    strategy = make_strategy(parameters)
    reduce_step(strategy, parameters, make_gradients(parameters))
    before = gradient_norm(parameters)
    assert before > 0.5
    assert float(strategy.clip_grad_norm_(max_norm)) == pytest.approx(before)
    assert gradient_norm(parameters) == pytest.approx(clipped or before, rel=1e-4)


def gradient_norm(parameters: list[nn.Parameter]) -> float:
    gradients = [parameter.grad.flatten() for parameter in parameters if parameter.grad is not None]
    return float(torch.cat(gradients).norm())


def test_buckets_go_from_the_last_parameter_to_the_first_and_stay_small() -> None:
    sizes = [3, BUCKET_BYTES // 4, 5, BUCKET_BYTES // 8, BUCKET_BYTES // 8, 7]
    buckets = make_buckets([nn.Parameter(torch.empty(size, device="meta")) for size in sizes])
    assert [number for bucket in buckets for number in bucket] == [5, 4, 3, 2, 1, 0]
    assert len(buckets) > 1
    for bucket in buckets:
        assert len(bucket) == 1 or 4 * sum(sizes[number] for number in bucket) <= BUCKET_BYTES
