"""What the programs of lessons 9 to 12 share: data, model and windows of earlier lessons; counts of bytes.

Each of these programs trains what lesson 3 trains, by another mechanism. What they have in common is here, so
that a program shows its mechanism and nothing else.
"""

import os
import statistics
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, BLOCK_SIZE = 1337, 4, 400, 64
BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 1e-3, 10
STEPS_PER_EPOCH = WINDOWS // BATCH_SIZE
STEPS = EPOCHS * STEPS_PER_EPOCH


def start() -> tuple[TensorDataset, GPT]:
    """Make the process group, and then the windows and the model of lesson 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")  # on the CPU, where bytes can be counted everywhere
    if BATCH_SIZE % dist.get_world_size():
        raise ValueError(f"{BATCH_SIZE} windows cannot be shared evenly by {dist.get_world_size()} workers")
    text = Path("data/input.txt").read_text()
    tokenizer = CharTokenizer.train(text)
    tokens = torch.from_numpy(tokenizer.encode(text)).long()[: WINDOWS * BLOCK_SIZE + 1]
    inputs, targets = tokens[:-1].view(WINDOWS, BLOCK_SIZE), tokens[1:].view(WINDOWS, BLOCK_SIZE)
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=len(tokenizer), block_size=BLOCK_SIZE)
    return TensorDataset(inputs, targets), gpt


def batch_of(step: int) -> Tensor:
    """The numbers of the windows of a step, 1 to STEPS, on all ranks together."""
    epoch, batch = divmod(step - 1, STEPS_PER_EPOCH)
    order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(SEED + epoch))
    return order.split(BATCH_SIZE)[batch]


def windows_of(step: int) -> Tensor:
    """The windows that this rank reads in a step: those that DistributedSampler would give."""
    return batch_of(step)[dist.get_rank() :: dist.get_world_size()]


def report(name: str, loss: Tensor) -> None:
    """Print the mean of the ranks' losses, which is the whole batch's. A collective: all ranks call it."""
    total = loss.detach().clone()
    dist.all_reduce(total)  # the sum
    if dist.get_rank() == 0:
        print(f"{name} loss {total.item() / dist.get_world_size():.6f}", flush=True)


def report_step(step: int, loss: Tensor) -> None:
    """Report the loss of every tenth step."""
    if step % LOG_EVERY == 0:
        report(f"step {step:3}", loss)


def join_weights(parameters: list[nn.Parameter]) -> Tensor:
    """Put the weights into one tensor, one behind the other, and make each parameter a view of its part."""
    whole = torch.cat([parameter.detach().flatten() for parameter in parameters])
    views = whole.split([parameter.numel() for parameter in parameters])
    for parameter, view in zip(parameters, views, strict=True):
        parameter.data = view.view_as(parameter)
    return whole


def join_gradients(parameters: list[nn.Parameter]) -> Tensor:
    """Copy the gradients into one tensor, one behind the other."""
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """The bytes of memory behind the tensors, each storage once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    storages = [tensor.untyped_storage() for tensor in local if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def averages(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """AdamW's two averages of every parameter. Its counts of steps, 4 bytes a tensor, are left out."""
    return [value for state in optimizer.state.values() for value in state.values() if value.ndim]


def ring_bytes(whole: Tensor) -> int:
    """What each of W ranks sends for an all-gather or a reduce-scatter of `whole`: all but its own part.

    An all-reduce is a reduce-scatter and then an all-gather, so it sends twice as much.
    """
    return whole.nbytes * (dist.get_world_size() - 1) // dist.get_world_size()


class SentBytes(TorchDispatchMode):
    """While entered, counts what this rank sends, from the tensors that collectives are called with.

    PyTorch calls it before every operation, also before those that DDP and FSDP2 call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = self.collectives = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":  # where collectives are
            self.sent += self.bytes_of(func.name().removeprefix("c10d::"), args)
            self.collectives += 1
        return func(*args, **(kwargs or {}))

    def bytes_of(self, name: str, args: Any) -> int:
        match name:
            case "allreduce_":
                return sum(2 * ring_bytes(tensor) for tensor in args[0])
            case "_allgather_base_":
                return ring_bytes(args[0])
            case "_reduce_scatter_base_":
                return ring_bytes(args[1])
            case "broadcast_":  # counted on the rank that it comes from
                return sum(tensor.nbytes for tensor in args[0]) if args[2] == dist.get_rank() else 0
        raise NotImplementedError(f"no rule for the bytes that {name} sends")


class Meter:
    """Times the steps, and counts bytes in the last one, not timed because counting takes time."""

    def __init__(self, gpt: GPT) -> None:
        self.gpt, self.is_counting, self.durations_ms = gpt, False, list[float]()
        self.held, self.saved, self.sent = dict[str, int](), dict[int, int](), SentBytes()
        gpt.register_forward_pre_hook(lambda *_: self.saved.clear())  # those of the micro-batch before

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        self.is_counting = number == STEPS
        if self.is_counting:
            with self.sent, saved_tensors_hooks(self.count_saved, lambda tensor: tensor):
                yield
        else:
            began = time.perf_counter()
            yield
            self.durations_ms.append(1000 * (time.perf_counter() - began))

    def count_saved(self, tensor: Tensor) -> Tensor:
        """Called for each tensor that the backward pass will need. Weights are no activations."""
        weights = (weight for weight in self.gpt.parameters() if not isinstance(weight, DTensor))
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in {weight.untyped_storage().data_ptr() for weight in weights}:
            self.saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def hold(self, **tensors: Iterable[Tensor | None]) -> None:
        """Note how much memory is behind these tensors now. The largest figure of each name is printed."""
        for name, held in tensors.items() if self.is_counting else ():
            self.held[name] = max(self.held.get(name, 0), storage_bytes(held))

    def print(self) -> None:
        """Print a row of bytes by rank for all that was counted. A collective: all ranks call it."""
        rows = {**self.held, "saved_activations": sum(self.saved.values()), "sent_in_a_step": self.sent.sent}
        by_rank = [rows for _ in range(dist.get_world_size())]
        dist.all_gather_object(by_rank, rows)
        if dist.get_rank() == 0:
            print(f"{'bytes':24}" + "".join(f"{f'rank {rank}':>12}" for rank in range(len(by_rank))))
            for name in rows:
                print(f"{name.replace('_', ' '):24}" + "".join(f"{found[name]:>12,}" for found in by_rank))
            time_ms = statistics.median(self.durations_ms)
            print(f"{self.sent.collectives} collectives and about {time_ms:.0f} ms a step", flush=True)


def finish(meter: Meter, loss: Tensor) -> None:
    """Print what was counted and the final loss, and end this process."""
    meter.print()
    report("final", loss)
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb
