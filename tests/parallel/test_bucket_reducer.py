"""Sums over real ranks, by shared memory and by gloo, against the sums of one process."""

import functools

import pytest
import torch
from support.forks import results_of
from torch import Tensor

from mingpt.distributed import DistributedContext
from mingpt.parallel.exact import BucketReducer
from mingpt.parallel.tree import PartialSums, cover, push

LEAVES = 7
SIZES = (12, 400_000, 5)  # elements of the buckets; the second is larger than the first segments


def leaf(bucket: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * bucket + number)
    return torch.randn(SIZES[bucket], generator=generator)


def tree_sum(bucket: int, leaves: range) -> PartialSums[Tensor]:
    stack: PartialSums[Tensor] = []
    for number in leaves:
        push(stack, 0, number, leaf(bucket, number), LEAVES, lambda left, right: left + right)
    return stack


def reduce_all(context: DistributedContext, shares: bool, gathers: bool) -> list[Tensor]:
    rank, ranks = context.rank, context.world_size
    parts = [range(place * LEAVES // ranks, (place + 1) * LEAVES // ranks) for place in range(ranks)]
    memory = context.connect_memory(10.0) if shares else None
    assert (memory is not None) == shares
    reducer = BucketReducer([cover(part, LEAVES) for part in parts], rank, LEAVES, memory)
    futures = []
    for bucket, size in enumerate(SIZES):
        pieces = [list(value.split(4)) for _, _, value in tree_sum(bucket, parts[rank])]
        chunk = -(-size // ranks)
        sizes = [max(0, min(chunk, size - chunk * place)) for place in range(ranks)]
        if not gathers:  # then the other chunks may hold anything
            sizes = [*sizes[1:], sizes[0]]
        futures.append(reducer.reduce(pieces, sizes, torch.empty(0), gathers))
    return [future.result() for future in futures]


@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    ("ranks", "gathers"), [(2, True), (3, True), (3, False), (4, True), (5, True), (8, True)]
)
def test_the_bits_are_those_of_one_process(ranks: int, gathers: bool, shares: bool) -> None:
    """8 ranks have one of the 7 leaves or none. If sums are not gathered, each rank gets its chunk."""
    results = results_of(ranks, functools.partial(reduce_all, shares=shares, gathers=gathers))
    for bucket in range(len(SIZES)):
        ((_, _, expected),) = tree_sum(bucket, range(LEAVES))
        found = [sums[bucket] for sums in results]
        for whole in found if gathers else [torch.cat(found)]:
            assert torch.equal(whole, expected)
