import random

import pytest
import torch
from torch import nn

from mingpt.reduce import GradientTree, Stack, cover, push
from mingpt.sampler import ElasticSampler


def shares(leaves: int, workers: int) -> list[range]:
    return [range(rank * leaves // workers, (rank + 1) * leaves // workers) for rank in range(workers)]


def tree(values: list[float]) -> float:
    """The definition: a left half of a power of two, plus the rest."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return tree(values[:half]) + tree(values[half:])


def fold(nodes: list[tuple[int, int, float]], leaves: int) -> Stack[float]:
    stack: Stack[float] = []
    for level, index, value in nodes:
        push(stack, level, index, value, leaves, lambda left, right: left + right)
    return stack


@pytest.mark.parametrize("leaves", [*range(1, 18), 40, 63])
def test_the_sum_is_the_tree_whoever_computes_it(leaves: int) -> None:
    """Every number of workers up to the number of leaves, and two more; values whose sum depends on the order."""
    dice = random.Random(leaves)
    values = [dice.uniform(-1, 1) * 10 ** dice.randrange(12) for _ in range(leaves)]
    for workers in range(1, leaves + 3):
        parts = [node for share in shares(leaves, workers) for node in fold([(0, leaf, values[leaf]) for leaf in share], leaves)]
        ((_, _, total),) = fold(parts, leaves)
        assert total == tree(values)


def test_the_order_matters_for_these_values() -> None:
    values = [1e16, 1.0, -1e16, 1.0]
    assert tree(values) != sum(values) and tree(values) == (1e16 + 1.0) + (-1e16 + 1.0)


@pytest.mark.parametrize(("leaves", "workers"), [(8, 1), (8, 2), (8, 3), (12, 5), (7, 7), (40, 6)])
def test_a_cover_holds_a_workers_leaves_in_few_nodes(leaves: int, workers: int) -> None:
    for share in shares(leaves, workers):
        nodes = cover(share, leaves)
        held = [leaf for level, index in nodes for leaf in range(index << level, min((index + 1) << level, leaves))]
        assert held == list(share) and len(nodes) <= 2 * leaves.bit_length()
    assert all(len(cover(share, 8)) == 1 for share in shares(8, 4))


def test_the_sampler_deals_the_shares_that_the_tree_counts_on() -> None:
    from mingpt.data import CharDataset

    dataset = CharDataset(torch.zeros(100, dtype=torch.uint8).numpy(), 4)
    for workers in range(1, 12):
        dealt = [
            ElasticSampler(dataset, batch_size=16, micro_batch_size=2, seed=0, num_replicas=workers, rank=rank).micro_batches()
            for rank in range(workers)
        ]
        assert [leaf for share in dealt for leaf in share] == list(range(8))


@pytest.mark.parametrize("borrowed", [False, True])
def test_gradients_that_the_next_backward_pass_writes_over_are_copied(borrowed: bool) -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.zeros(7)), nn.Parameter(torch.zeros(2, 3))]
    leaves = [[torch.randn_like(weight) for weight in weights] for _ in range(6)]
    places = [torch.empty_like(weight) for weight in weights]
    summing = GradientTree(weights, [range(6)], 0, borrowed=borrowed)
    summing.begin()
    for number, gradients in enumerate(leaves):
        summing.before(number)
        for weight, place, gradient in zip(weights, places, gradients, strict=True):
            weight.grad = place.copy_(gradient)
        summing.after(number)
    summing.finish()
    first, second, third = ([one + other for one, other in zip(leaves[i], leaves[i + 1], strict=True)] for i in (0, 2, 4))
    right = [a + b + c for a, b, c in zip(first, second, third, strict=True)]
    assert all(torch.equal(weight.grad, total) for weight, total in zip(weights, right, strict=True) if weight.grad is not None) == borrowed
