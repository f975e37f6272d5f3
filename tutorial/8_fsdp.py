"""Lesson 8: FSDP2. Each rank holds a share of every weight, of its gradient and of its optimizer state.

    torchrun --standalone --nproc_per_node=2 -m tutorial.8_fsdp

With --bf16 at the end, weights are gathered and used in bfloat16, and gradients are summed in float32.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, EVAL_WINDOWS, BLOCK_SIZE = 1337, 4, 400, 101, 64
BATCH_SIZE, MICRO_BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 4, 1e-3, 10
STEPS_PER_EPOCH = WINDOWS // BATCH_SIZE
OUT = Path("out/tutorial/8_fsdp.pt")


def make_datasets() -> tuple[TensorDataset, TensorDataset, int]:
    """Windows that lie end to end, to train and then to evaluate on. And the size of the vocabulary."""
    text = Path("data/input.txt").read_text()
    tokenizer = CharTokenizer.train(text)
    count = WINDOWS + EVAL_WINDOWS
    tokens = torch.from_numpy(tokenizer.encode(text)).long()[: count * BLOCK_SIZE + 1]
    inputs, targets = tokens[:-1].view(count, BLOCK_SIZE), tokens[1:].view(count, BLOCK_SIZE)
    train = TensorDataset(inputs[:WINDOWS], targets[:WINDOWS])
    return train, TensorDataset(inputs[WINDOWS:], targets[WINDOWS:]), len(tokenizer)


def report(name: str, loss: torch.Tensor) -> None:
    """Print the mean of the ranks' losses, which is the whole batch's. A collective: all ranks call it."""
    total = loss.detach().clone()
    dist.all_reduce(total)  # the sum
    if dist.get_rank() == 0:
        print(f"{name} loss {total.item() / dist.get_world_size():.6f}", flush=True)


@torch.no_grad()
def evaluate(gpt: GPT, dataset: TensorDataset, device: torch.device) -> None:
    """Each window once, one per rank in a round: all take part, because a forward pass gathers weights."""
    gpt.eval()
    total, world_size = torch.zeros((), device=device), dist.get_world_size()
    for first in range(0, len(dataset), world_size):
        window = first + dist.get_rank()
        inputs, targets = dataset[[window % len(dataset)]]  # past the end, one that is not counted
        _, loss = gpt(inputs.to(device), targets.to(device))
        total += loss * (window < len(dataset))
    gpt.train()
    report("validation", total * world_size / len(dataset))  # which divides by world_size


def full(state: Any) -> Any:
    """The state with whole tensors for sharded ones, as in lesson 4. A collective: all ranks call it."""
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return state.full_tensor().cpu() if isinstance(state, DTensor) else state


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true", help="matrix products in bfloat16")
    bf16 = parser.parse_args().bf16
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # workers of this machine
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # from MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, set by torchrun
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % (world_size * MICRO_BATCH_SIZE):
        raise ValueError(f"{BATCH_SIZE} windows are not whole micro-batches for each of {world_size} workers")
    dataset, eval_dataset, vocab_size = make_datasets()
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    mesh = dist.init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32)
    for block in gpt.h:  # its weights are gathered together
        fully_shard(block, mesh=mesh, mp_policy=policy)
    model = fully_shard(gpt, mesh=mesh, mp_policy=policy)  # the weights that are left; `model` is `gpt`
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)

    for step in range(1, EPOCHS * STEPS_PER_EPOCH + 1):
        epoch, batch = divmod(step - 1, STEPS_PER_EPOCH)
        order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order.split(BATCH_SIZE)[batch][rank::world_size]
        loss, micro_batches = torch.zeros((), device=device), mine.split(MICRO_BATCH_SIZE)
        for number, windows in enumerate(micro_batches, start=1):
            inputs, targets = (part.to(device) for part in dataset[windows])
            model.set_requires_gradient_sync(number == len(micro_batches))  # until then gradients are whole
            _, mean = gpt(inputs, targets)
            (mean / len(micro_batches)).backward()  # the last exchanges what all have accumulated
            loss += mean.detach() / len(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            report(f"step {step:3}", loss)

    state = full({"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
    if rank == 0:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, OUT)
    evaluate(gpt, eval_dataset, device)
    report("final", loss)
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


if __name__ == "__main__":
    main()
