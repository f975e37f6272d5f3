"""Exercise 3: write DDP from hooks and buckets, with bits that do not depend on W. The problem: 3_ddp.md

python -m tutorial.check 3
"""

from torch import nn


class DDP:
    """Average the gradients of all ranks during the backward pass.

    A step has 4 parts, each with a mean loss and a backward pass of its own. Each of W ranks (1, 2 or 4) has
    `count` = 4 / W of them: part `number` of rank r is part r * count + number of the step. Gradients are
    collected in buckets, and a bucket is sent by a collective with `async_op=True` as soon as its gradients
    of the rank's last part are there. The model's parameters all take part in each loss.
    """

    def __init__(self, model: nn.Module, bucket_bytes: int) -> None:
        """`bucket_bytes`: a bucket that has as many is full. All ranks have the same weights."""
        raise NotImplementedError("DDP")

    def start_part(self, number: int, count: int) -> None:
        """Called before the forward pass of this rank's part `number`, 0 to `count` - 1."""
        raise NotImplementedError("start_part")

    def finish(self) -> None:
        """Called after the last part. Then `.grad` is the mean over all parts, in the same bits for any W."""
        raise NotImplementedError("finish")
