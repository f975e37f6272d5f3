"""Exercise 6: write AdamW whose averages are shared out among the ranks. The problem: 6_zero1.md

python -m tutorial.check 6
"""

from torch import nn


class ShardedAdamW:
    """`torch.optim.AdamW(parameters, lr)` with gradients clipped to `max_norm`, on any number of ranks.

    The parameters have n numbers in all, which W need not divide. Between steps each rank keeps the two
    averages for a share of about n / W numbers and, if you want, a copy of the share's weights: at most 12
    bytes for each number of the share. It keeps no other tensors.
    """

    def __init__(self, parameters: list[nn.Parameter], lr: float, max_norm: float) -> None:
        """All ranks have the same weights."""
        raise NotImplementedError("ShardedAdamW")

    def step(self) -> float:
        """Update the weights, and return the norm of the batch's gradient as it is before clipping.

        Each `.grad` is the gradient of the mean loss of this rank's windows. Every rank has as many windows
        as any other, so the batch's gradient is the mean over ranks. Afterwards all ranks have the same
        weights, in the same parameters. `.grad` may hold anything: it is set to None next.
        """
        raise NotImplementedError("step")
