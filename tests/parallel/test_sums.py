"""The tree of sums, and sums over real ranks, by shared memory and by gloo, against the naive sum."""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.forks import results_of, share_memory
from support.properties import examples
from torch import Tensor

from mingpt.base.rows import split_rows
from mingpt.data.windows import micro_batch_shares
from mingpt.distributed import DistributedContext
from mingpt.extras.shared_memory import SharedMemoryTransport
from mingpt.parallel.exact import make_reduction, naive_sum
from mingpt.parallel.tree import PartialSums, add_nodes, cover, push

LEAVES = 7
SIZES = (12, 270_000, 5)  # elements of the buckets; the second is larger than the first segments


def leaf(bucket: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * bucket + number)
    return torch.randn(SIZES[bucket], generator=generator)


def check_sums(context: DistributedContext, shares: bool, gathers: bool) -> bool:
    """Assert that this rank gets the naive sum of each bucket, or, unless all ranks get it, its chunk."""
    if shares:
        assert isinstance(share_memory(context), SharedMemoryTransport)
    rank, ranks = context.rank, context.world_size
    parts = micro_batch_shares(LEAVES, ranks)
    for bucket, size in enumerate(SIZES):
        leaves = [leaf(bucket, number) for number in parts[rank]]
        expected = naive_sum(leaves, context)
        partial_sums: PartialSums[Tensor] = []
        for number, value in zip(parts[rank], leaves, strict=True):
            push(partial_sums, 0, number, value, LEAVES, torch.add)
        pieces = [list(value.split(4)) for _, _, value in partial_sums]
        sizes = [len(chunk) for chunk in split_rows(size, ranks)]
        if not gathers:  # then the other chunks may hold anything
            sizes = [*sizes[1:], sizes[0]]
            expected = expected.split(sizes)[rank]
        reduction = make_reduction(parts, sizes, torch.empty(0), gathers)
        assert torch.equal(context.transport.reduce(pieces, reduction), expected)
    return True


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("ranks", "gathers"), [(2, True), (3, True), (3, False), (5, True), (8, True)])
def test_the_bits_are_those_of_the_naive_sum(ranks: int, gathers: bool, shares: bool) -> None:
    """8 ranks have one of the 7 leaves or none."""
    results_of(ranks, functools.partial(check_sums, shares=shares, gathers=gathers))


def sum_as_pairs(leaves: Sequence[int]) -> Any:
    """The sum by definition, as pairs: a left half with a power of two of the leaves, plus the rest."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << (len(leaves) - 1).bit_length() - 1
    return sum_as_pairs(leaves[:half]), sum_as_pairs(leaves[half:])


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
    assert total == sum_as_pairs(range(leaves))
