"""Exercise 1: write an all-reduce from send and recv, as a ring. The problem: tutorial/exercises/1_ring.md

python -m tutorial.check 1
"""

from torch import Tensor


def all_reduce(tensor: Tensor) -> Tensor:
    """Return the sum of all ranks' tensors, on every rank. A collective: all ranks call it.

    `tensor` has one dimension, the same length and type on each rank, and may be changed. Its length need
    not be a multiple of the number of ranks. The process group is there (`dist.get_rank()`). Only point to
    point operations are allowed: `dist.send`, `recv`, `isend`, `irecv`, `batch_isend_irecv`. Each rank sends
    only to the next rank, the last one to rank 0: W - 1 chunks until each chunk is summed somewhere, and
    W - 1 until all ranks have all sums.
    """
    raise NotImplementedError("all_reduce")
