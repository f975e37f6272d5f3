"""Sums over real ranks, by shared memory and by gloo, against the naive sum."""

import functools

import pytest
import torch
from support.forks import results_of, share_memory
from torch import Tensor

from mingpt.base.rows import split_rows
from mingpt.data.windows import micro_batch_shares
from mingpt.distributed import DistributedContext
from mingpt.extras.shared_memory import SharedMemoryTransport
from mingpt.parallel.exact import make_reduction, naive_sum
from mingpt.parallel.tree import PartialSums, push

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
