"""The tree of sums, whatever the number of leaves and whoever adds them."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from support.properties import examples

from mingpt.parallel.tree import PartialSums, add_nodes, cover, push


def naive_sum(leaves: Sequence[int]) -> Any:
    """The sum by definition, as pairs: a left half with a power of two of the leaves, plus the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return naive_sum(leaves[:half]), naive_sum(leaves[half:])


def add(left: Any, right: Any) -> Any:
    return left, right


def leaves_of(level: int, index: int, leaves: int) -> range:
    return range(index << level, min((index + 1) << level, leaves))


@examples(300)
@given(st.integers(1, 80), st.lists(st.integers(0, 80), max_size=9))
def test_the_sum_is_that_of_the_tree_and_each_part_of_the_leaves_is_held_in_the_fewest_nodes(
    leaves: int, cuts: list[int]
) -> None:
    """The leaves are cut into consecutive parts, some of them empty."""
    nodes: PartialSums[Any] = []
    for first, end in pairwise([0, *sorted(min(cut, leaves) for cut in cuts), leaves]):
        part: PartialSums[Any] = []
        for leaf in range(first, end):
            push(part, 0, leaf, leaf, leaves, add)
        places = [(level, index) for level, index, _ in part]
        assert cover(range(first, end), leaves) == places
        assert [leaf for place in places for leaf in leaves_of(*place, leaves)] == [*range(first, end)]
        for level, index in places:
            twice = leaves_of(level + 1, index // 2, leaves)
            assert 1 << level >= leaves or twice.start < first or twice.stop > end, "one node would do"
        nodes += part
    total = add_nodes([node[:2] for node in nodes], [value for _, _, value in nodes], leaves, add)
    assert total == naive_sum(range(leaves))
