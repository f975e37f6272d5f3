"""A communication hook of DDP that adds gradients in one order, whatever the number of workers is.

    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(ExactHook(ddp, MICRO_BATCHES), ExactHook.reduce)

The rest of the loop is as usual: a worker runs all its micro-batches but the last under `ddp.no_sync()`.
Without the hook, DDP would add gradients up in `grad`, and the bits would depend on which micro-batches a
worker has. With the hook, gradients are added in the same order as by ExactReduction (exact.py).
"""

import functools
from collections import Counter, defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from mingpt.base.rows import split_rows
from mingpt.data.windows import micro_batch_shares
from mingpt.distributed.transport import Transport
from mingpt.parallel.ddp import backward_zeros
from mingpt.parallel.exact import Overlap, make_reduction
from mingpt.parallel.tree import PartialSums, push


class ExactHook:
    """The state of a DDP model's communication hook; `ExactHook.reduce` is the hook.

    `micro_batches` is the number of micro-batches in a step, and must not depend on the number of workers.
    Each worker makes a backward pass for each micro-batch in its `share`, a range of micro-batch numbers, in
    order. `grad` becomes the sum over all micro-batches of the step, not the mean: divide each loss by
    `micro_batches` if you want the mean. `grad` must be None before a step, as `zero_grad` leaves it. If
    parameters may take no part in a micro-batch, call `finish_step` after the last backward pass of each
    step. Raises ValueError if there are more workers than micro-batches, if the DDP model has
    find_unused_parameters, or if all its parameters are frozen.
    """

    def __init__(self, model: DistributedDataParallel, micro_batches: int) -> None:
        rank, workers = dist.get_rank(model.process_group), dist.get_world_size(model.process_group)
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        if workers > micro_batches or model.find_unused_parameters or not self.weights:
            raise ValueError(
                f"{workers} workers need at least as many micro-batches, not {micro_batches}, no "
                "find_unused_parameters, whose collectives would meet the hook's, and a parameter to train"
            )
        self.model, self.micro_batches = model, micro_batches
        self.shares = micro_batch_shares(micro_batches, workers)
        self.share = self.shares[rank]
        self.transport = Transport(rank, workers, model.process_group)
        self.counts = Counter[Tensor]()  # {parameter: number of its gradients in this step so far}
        self.partial_sums = defaultdict[Tensor, PartialSums[Tensor]](list)
        self.arrived = set[Tensor]()  # the weights that took part in the last backward pass
        self.overlap = Overlap(self.weights[0].device)
        model.register_forward_pre_hook(self.fill_missing)
        for weight in self.weights:
            weight.register_post_accumulate_grad_hook(self.take_gradient)

    def fill_missing(self, *_: object) -> None:
        """Before a forward pass, add zeros for weights that took no part in the previous backward pass."""
        made = max(self.counts.values(), default=0)
        for weight in self.weights:
            if self.counts[weight] < made:
                self.add(weight, torch.zeros_like(weight))
        self.arrived.clear()

    def finish_step(self) -> None:
        """Let DDP reduce zeros for weights that took no part in the last backward pass. Collective."""
        backward_zeros(weight for weight in self.weights if weight not in self.arrived)

    def take_gradient(self, weight: Tensor) -> None:
        """Move a gradient from `grad` to the partial sums, unless DDP reduces it in this backward pass."""
        self.arrived.add(weight)
        if not self.model.require_backward_grad_sync:
            gradient, weight.grad = weight.grad, None
            assert gradient is not None
            self.add(weight, gradient)

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        number = self.share.start + self.counts[weight]
        push(self.partial_sums[weight], 0, number, gradient, self.micro_batches, Tensor.add_)
        self.counts[weight] += 1

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """Begin to sum a bucket's gradients over all micro-batches of the step; return a future of the sum.

        DDP calls this in the last backward pass of a step, or in `finish_step`. Raises ValueError if this
        worker has not made one backward pass for each micro-batch of its share. Collective.
        """
        weights = bucket.parameters()
        for weight, gradient in zip(weights, bucket.gradients(), strict=True):
            self.add(weight, gradient)
        made = {self.counts.pop(weight) for weight in weights}
        if made != {len(self.share)}:
            raise ValueError(
                f"rank {self.transport.rank} made {made} backward passes in a step, and its share of "
                f"{self.micro_batches} micro-batches is {len(self.share)}"
            )
        by_weight = [self.partial_sums.pop(weight) for weight in weights]
        pieces = [
            # As vectors in the order of the gradients' memory, which is also their order in the bucket.
            [part.as_strided((part.numel(),), (1,)) for _, _, part in of_node]
            for of_node in zip(*by_weight, strict=True)
        ]
        buffer = bucket.buffer()
        sizes = [len(rows) for rows in split_rows(len(buffer), self.transport.world_size)]
        reduction = make_reduction(self.shares, sizes, buffer, gathers=True)
        total = self.overlap.run(functools.partial(self.transport.reduce, pieces, reduction), pieces)
        return total.then(lambda done: done.value())  # which passes an error on to DDP
