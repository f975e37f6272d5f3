import random

import pytest

from mingpt.data.windows import micro_batch_shares
from mingpt.parallel.tree import PartialSums, cover, push


def sum_of_tree(values: list[float]) -> float:
    """The sum by definition: a left half with a power of two of the leaves, plus the rest."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return sum_of_tree(values[:half]) + sum_of_tree(values[half:])


def push_all(nodes: list[tuple[int, int, float]], leaves: int) -> PartialSums[float]:
    stack: PartialSums[float] = []
    for level, index, value in nodes:
        push(stack, level, index, value, leaves, lambda left, right: left + right)
    return stack


@pytest.mark.parametrize("leaves", [*range(1, 18), 40, 63])
def test_the_sum_is_that_of_the_tree_whoever_computes_it(leaves: int) -> None:
    """There are up to two more workers than leaves; the sum depends on the order of additions."""
    generator = random.Random(leaves)
    values = [generator.uniform(-1, 1) * 10 ** generator.randrange(12) for _ in range(leaves)]
    for workers in range(1, leaves + 3):
        parts: list[tuple[int, int, float]] = []
        for part in micro_batch_shares(leaves, workers):
            parts += push_all([(0, leaf, values[leaf]) for leaf in part], leaves)
        ((_, _, total),) = push_all(parts, leaves)
        assert total == sum_of_tree(values)


@pytest.mark.parametrize(("leaves", "workers"), [(8, 1), (8, 2), (8, 3), (12, 5), (7, 7), (40, 6)])
def test_a_cover_holds_a_workers_leaves_in_few_nodes(leaves: int, workers: int) -> None:
    for part in micro_batch_shares(leaves, workers):
        nodes = cover(part, leaves)
        held: list[int] = []
        for level, index in nodes:
            held += range(index << level, min((index + 1) << level, leaves))
        assert held == list(part)
        assert len(nodes) <= 2 * leaves.bit_length()


def test_whole_subtrees_are_covered_by_one_node_each() -> None:
    assert [cover(part, 8) for part in micro_batch_shares(8, 4)] == [[(1, 0)], [(1, 1)], [(1, 2)], [(1, 3)]]
