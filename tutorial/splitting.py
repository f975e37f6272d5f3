"""What lessons 11 and 12 share: their start and end, and the counting of bytes on a rank that has a part."""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from mingpt.model import GPT
from tutorial import common


def start() -> tuple[int, int, GPT, TensorDataset]:
    """Join the other ranks. Returns rank, world size, and the weights and windows of lesson 1."""
    dataset, gpt = common.start()
    return dist.get_rank(), dist.get_world_size(), gpt, dataset


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Collects what the forward passes in its `with` block keep for their backward passes.

    Memory that several saved tensors share is counted once, and parameters are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        weights = {local(weight).untyped_storage().data_ptr() for weight in model.parameters()}
        self.by_address: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            storage = local(tensor).untyped_storage()
            if storage.data_ptr() not in weights:
                self.by_address[storage.data_ptr()] = storage.nbytes()
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        return sum(self.by_address.values())


def report(step: int, loss: Tensor | None) -> None:
    if loss is not None and step % common.LOG_EVERY == 0:
        print(f"step {step:3} loss {loss.item():.6f}", flush=True)


def finish(figures: str, loss: Tensor | None) -> None:
    """Print the figures of all ranks and the loss of the rank that has it, and end. All ranks call it."""
    by_rank: list[tuple[str, Tensor | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(by_rank, (figures, loss))
    if dist.get_rank() == 0:
        last = by_rank[-1][1]
        lines = [figures for figures, _ in by_rank] + ([] if last is None else [f"final loss {last:.6f}"])
        print(*lines, sep="\n", flush=True)
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


def held(model: nn.Module, optimizer: torch.optim.Optimizer, saved: int) -> str:
    """What this rank holds at the end of a backward pass. AdamW's count of steps is left out."""
    weights = [local(weight) for weight in model.parameters()]
    gradients = [local(weight.grad) for weight in model.parameters() if weight.grad is not None]
    state = [local(value) for values in optimizer.state.values() for value in values.values()]
    sizes = [sum(tensor.nbytes for tensor in group if tensor.dim()) for group in (weights, gradients, state)]
    line = f"rank {dist.get_rank()} holds bytes: weights {sizes[0]:,}, gradients {sizes[1]:,}, "
    line += f"optimizer state {sizes[2]:,}"
    return f"{line}, saved activations {saved:,}" if saved else line
