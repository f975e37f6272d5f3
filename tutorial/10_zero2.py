"""Lesson 10, part 2: ZeRO-2 by hand. Each rank also keeps only its share of the mean gradients.

    torchrun --standalone --nproc_per_node=2 -m tutorial.10_zero2

Gradients are exchanged in buckets, as in lesson 9. Once a bucket is exchanged, its whole gradients are freed.
With --torch at the end, fully_shard of FSDP2 does it.
"""

import argparse
import functools

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from tutorial import common

BUCKET_BYTES = 64 * 1024


class Bucket:
    """Parameters that lie in one tensor, of which each rank updates a share."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.weights = common.join_weights(parameters)
        self.share = nn.Parameter(self.weights.chunk(dist.get_world_size())[dist.get_rank()])  # a view
        self.missing = len(parameters)  # gradients

    def reduce_scatter(self, whole: Tensor) -> None:
        """Give each rank its share of the mean gradient. A collective."""
        self.share.grad = torch.empty_like(self.share)
        dist.reduce_scatter_tensor(self.share.grad, whole.div_(dist.get_world_size()))

    def all_gather(self) -> None:
        """Give all ranks the shares of the weights that each has updated. A collective."""
        dist.all_gather_into_tensor(self.weights, self.share.detach())


def make_buckets(parameters: list[nn.Parameter]) -> list[Bucket]:
    """The parameters from the last one on, in buckets that are closed when they hold BUCKET_BYTES."""
    buckets: list[list[nn.Parameter]] = [[]]
    for parameter in reversed(parameters):
        if sum(other.nbytes for other in buckets[-1]) >= BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(parameter)
    return [Bucket(bucket) for bucket in buckets]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    by_torch = parser.parse_args().torch
    dataset, gpt = common.start()
    meter, buckets = common.Meter(gpt), list[Bucket]()
    if by_torch:
        fully_shard(gpt, reshard_after_forward=False)  # in the backward pass weights are still whole
        shares = list(gpt.parameters())
    else:
        buckets = make_buckets(list(gpt.parameters()))
        shares = [bucket.share for bucket in buckets]

    def on_grad_ready(bucket: Bucket, _: Tensor) -> None:
        bucket.missing -= 1
        if bucket.missing:
            return
        whole = common.join_gradients(bucket.parameters)
        meter.hold(gradients_at_most=[whole, *(tensor.grad for tensor in (*gpt.parameters(), *shares))])
        for parameter in bucket.parameters:
            parameter.grad = None
        bucket.reduce_scatter(whole)
        bucket.missing = len(bucket.parameters)

    for bucket in buckets:
        for parameter in bucket.parameters:
            parameter.register_post_accumulate_grad_hook(functools.partial(on_grad_ready, bucket))
    optimizer = torch.optim.AdamW(shares, lr=common.LEARNING_RATE)
    for step in range(1, common.STEPS + 1):
        with meter.step(step):
            _, loss = gpt(*dataset[common.windows_of(step)])
            loss.backward()
            meter.hold(gradients=[share.grad for share in shares])
            optimizer.step()  # of this rank's shares
            optimizer.zero_grad()
            for bucket in buckets:
                bucket.all_gather()
        common.report_step(step, loss)
    meter.hold(weights=gpt.parameters(), optimizer_state=common.averages(optimizer))
    common.finish(meter, loss)


if __name__ == "__main__":
    main()
