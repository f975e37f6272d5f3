"""The binary tree along which gradients are added, whichever ranks add them.

The leaves are the gradients of a step's micro-batches.

Node (level, index) is the sum of leaves index * 2**level to (index + 1) * 2**level - 1. A node is computed as
its left half plus its right half. If the right half would lie past the last leaf, the node is its left half.
Floating-point addition is not associative, so the order of additions determines the bits of a sum. The tree
fixes this order; which ranks add does not matter.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

V = TypeVar("V")
PartialSums = list[tuple[int, int, V]]  # (level, index, sum), from left to right


def push(
    stack: PartialSums[V], level: int, index: int, value: V, leaves: int, add: Callable[[V, V], V]
) -> None:
    """Append node (level, index), whose sum is `value`, to `stack`, and merge halves into larger nodes.

    `add(left half, right half)` returns the sum of a larger node. Nodes must be pushed from left to right.
    `leaves` is the number of leaves of the whole tree; the node begins at leaf index * 2**level.
    """
    while 1 << level < leaves:
        if index % 2:
            if not stack or stack[-1][:2] != (level, index - 1):
                break
            left = stack.pop()[2]
            value = add(left, value)
        elif (index + 1) << level < leaves:
            break  # a right half is still to come
        level, index = level + 1, index // 2
    stack.append((level, index, value))


def add_nodes(
    nodes: Iterable[tuple[int, int]], values: Iterable[V], leaves: int, add: Callable[[V, V], V]
) -> V:
    """Return the sum of all leaves. `nodes` cover the leaves, left to right; `values` are the nodes' sums."""
    stack: PartialSums[V] = []
    for (level, index), value in zip(nodes, values, strict=True):
        push(stack, level, index, value, leaves, add)
    ((_, _, total),) = stack
    return total


def cover(leaves: Sequence[int], total: int) -> list[tuple[int, int]]:
    """Return the fewest nodes (level, index), left to right, that cover exactly the consecutive `leaves`.

    `leaves` are leaf numbers, and `total` is the number of leaves of the whole tree.
    """
    stack: PartialSums[None] = []
    for leaf in leaves:
        push(stack, 0, leaf, None, total, lambda *_: None)
    return [(level, index) for level, index, _ in stack]


def add_lists(left: list[Tensor], right: list[Tensor]) -> list[Tensor]:
    """Add each tensor of `left` to its counterpart in `right`, in place; return `right`."""
    torch._foreach_add_(right, left)
    return right
