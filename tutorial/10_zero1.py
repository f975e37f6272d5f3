"""Lesson 10, part 1: ZeRO-1 by hand. Each rank holds AdamW's averages only for its share of the weights.

    torchrun --standalone --nproc_per_node=2 -m tutorial.10_zero1

With --torch at the end, PyTorch's ZeroRedundancyOptimizer does it, beside DistributedDataParallel.
"""

import argparse

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.data import TensorDataset

from mingpt.model import GPT
from tutorial import common


def train_by_hand(dataset: TensorDataset, gpt: GPT, meter: common.Meter) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = common.join_weights(list(gpt.parameters()))
    gradients = torch.zeros_like(weights)
    views = gradients.split([parameter.numel() for parameter in gpt.parameters()])
    for parameter, view in zip(gpt.parameters(), views, strict=True):
        parameter.grad = view.view_as(parameter)  # to which backward passes add
    share = nn.Parameter(weights.chunk(world_size)[rank])  # a view: its update is one of the weights
    share.grad = gradients.chunk(world_size)[rank]
    optimizer = torch.optim.AdamW([share], lr=common.LEARNING_RATE)
    for step in range(1, common.STEPS + 1):
        with meter.step(step):
            _, loss = gpt(*dataset[common.windows_of(step)])
            loss.backward()
            gradients /= world_size
            dist.all_reduce(gradients)
            optimizer.step()  # of this rank's share
            dist.all_gather_into_tensor(weights, share.detach())  # the shares, in the order of ranks
            meter.hold(gradients=[gradients])
            gradients.zero_()
        common.report_step(step, loss)
    meter.hold(weights=[weights], optimizer_state=common.averages(optimizer))
    return loss


def train_with_torch(dataset: TensorDataset, gpt: GPT, meter: common.Meter) -> Tensor:
    model = nn.parallel.DistributedDataParallel(gpt, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(gpt.parameters(), torch.optim.AdamW, lr=common.LEARNING_RATE)
    for step in range(1, common.STEPS + 1):
        with meter.step(step):
            _, loss = model(*dataset[common.windows_of(step)])
            loss.backward()
            optimizer.step()  # of this rank's parameters, which it then broadcasts
            meter.hold(gradients=[parameter.grad for parameter in gpt.parameters()])
            optimizer.zero_grad()
        common.report_step(step, loss)
    meter.hold(weights=gpt.parameters(), optimizer_state=common.averages(optimizer.optim))
    return loss


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    train = train_with_torch if parser.parse_args().torch else train_by_hand
    dataset, gpt = common.start()
    meter = common.Meter(gpt)
    loss = train(dataset, gpt, meter)
    common.finish(meter, loss)


if __name__ == "__main__":
    main()
