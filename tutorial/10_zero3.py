"""Lesson 10, part 3: ZeRO-3 by hand. Each rank holds a share of everything; a block is gathered to be used.

    torchrun --standalone --nproc_per_node=2 -m tutorial.10_zero3

Options: --torch takes PyTorch's own, fully_shard of FSDP2. --checkpoint keeps only a block's input, and
computes its other activations again in the backward pass.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from mingpt.model import GPT
from mingpt.model.gpt import MLP
from tutorial import common


class Unit:
    """Parameters that are gathered together and freed together: those of a block, or the rest."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.whole = common.join_weights(parameters)
        self.whole_bytes = self.whole.nbytes
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.on_grad_ready)
        self.share = nn.Parameter(self.whole.chunk(dist.get_world_size())[dist.get_rank()].clone())
        self.missing = len(parameters)  # gradients
        self.free()

    def free(self) -> None:
        """Give back the memory of the weights; parameters remain, and so does what autograd knows of them."""
        self.whole.untyped_storage().resize_(0)

    def gather(self, *_: Any) -> None:
        """Fill the weights with all ranks' shares. A collective."""
        self.whole.untyped_storage().resize_(self.whole_bytes)
        dist.all_gather_into_tensor(self.whole, self.share.detach())

    def after_forward(self, _: nn.Module, inputs: Any, output: Tensor) -> None:
        self.free()
        output.register_hook(self.gather)  # called when the backward pass comes to this output

    def on_grad_ready(self, _: Tensor) -> None:
        """Once all gradients are there, keep this rank's share of their mean, and free the rest."""
        self.missing -= 1
        if self.missing:
            return
        whole = common.join_gradients(self.parameters) / dist.get_world_size()
        for parameter in self.parameters:
            parameter.grad = None
        self.free()
        self.share.grad = torch.empty_like(self.share)
        dist.reduce_scatter_tensor(self.share.grad, whole)
        self.missing = len(self.parameters)


def shard_by_hand(gpt: GPT) -> tuple[list[nn.Parameter], Unit]:
    """Returns the shares, for the optimizer, and the unit of the parameters that are in no block."""
    in_blocks = set(gpt.h.parameters())
    rest = Unit([parameter for parameter in gpt.parameters() if parameter not in in_blocks])
    shares = [rest.share]
    for block in gpt.h:
        unit = Unit(list(block.parameters()))
        shares.append(unit.share)
        block.register_forward_pre_hook(unit.gather)
        block.register_forward_hook(unit.after_forward)
    return shares, rest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--checkpoint", action="store_true")
    args = parser.parse_args()
    dataset, gpt = common.start()
    gpt.set_recompute(args.checkpoint)
    meter = common.Meter(gpt)
    if args.torch:
        for module in (*gpt.h, gpt):
            fully_shard(module)
        shares = list(gpt.parameters())
    else:
        shares, rest = shard_by_hand(gpt)
    for module in gpt.modules():
        if isinstance(module, MLP):  # in the middle of a block
            module.register_forward_pre_hook(
                lambda *_: meter.hold(weights_at_most=[*gpt.parameters(), *shares])
            )
    optimizer = torch.optim.AdamW(shares, lr=common.LEARNING_RATE)
    for step in range(1, common.STEPS + 1):
        with meter.step(step):
            if not args.torch:
                rest.gather()
            _, loss = gpt(*dataset[common.windows_of(step)])
            loss.backward()
            meter.hold(gradients=[share.grad for share in shares])
            optimizer.step()
            optimizer.zero_grad()
        common.report_step(step, loss)
    meter.hold(weights=[*gpt.parameters(), *shares], optimizer_state=common.averages(optimizer))
    common.finish(meter, loss)


if __name__ == "__main__":
    main()
