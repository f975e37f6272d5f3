"""Lesson 6: the same batch in micro-batches, whose gradients are accumulated before the ranks exchange them.

    torchrun --standalone --nproc_per_node=2 -m tutorial.6_accumulate

With --bf16 at the end, matrix products are computed in bfloat16. This goes on from lesson 3.
"""

import argparse
import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, BLOCK_SIZE = 1337, 4, 400, 64
BATCH_SIZE, MICRO_BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 4, 1e-3, 10
STEPS_PER_EPOCH = WINDOWS // BATCH_SIZE
OUT = Path("out/tutorial/6_accumulate.pt")


def make_dataset() -> tuple[TensorDataset, int]:
    """Windows that lie end to end: inputs, and targets one to the right. And the size of the vocabulary."""
    text = Path("data/input.txt").read_text()
    tokenizer = CharTokenizer.train(text)
    tokens = torch.from_numpy(tokenizer.encode(text)).long()[: WINDOWS * BLOCK_SIZE + 1]
    inputs, targets = tokens[:-1].view(WINDOWS, BLOCK_SIZE), tokens[1:].view(WINDOWS, BLOCK_SIZE)
    return TensorDataset(inputs, targets), len(tokenizer)


def report(name: str, loss: torch.Tensor) -> None:
    """Print the mean of the ranks' losses, which is the whole batch's. A collective: all ranks call it."""
    total = loss.detach().clone()
    dist.all_reduce(total)  # the sum
    if dist.get_rank() == 0:
        print(f"{name} loss {total.item() / dist.get_world_size():.6f}", flush=True)


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

    dataset, vocab_size = make_dataset()
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    for step in range(1, EPOCHS * STEPS_PER_EPOCH + 1):
        epoch, batch = divmod(step - 1, STEPS_PER_EPOCH)
        order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order.split(BATCH_SIZE)[batch][rank::world_size]
        loss, micro_batches = torch.zeros((), device=device), mine.split(MICRO_BATCH_SIZE)
        for number, windows in enumerate(micro_batches, start=1):
            inputs, targets = (part.to(device) for part in dataset[windows])
            is_last = number == len(micro_batches)
            with contextlib.nullcontext() if is_last else model.no_sync():
                with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
                    _, mean = model(inputs, targets)
                (mean / len(micro_batches)).backward()  # the last exchanges what all have accumulated
            loss += mean.detach() / len(micro_batches)
        optimizer.step()
        optimizer.zero_grad()
        if step % LOG_EVERY == 0:
            report(f"step {step:3}", loss)

    if rank == 0:
        OUT.parent.mkdir(parents=True, exist_ok=True)
        torch.save(gpt.state_dict(), OUT)
    report("final", loss)
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


if __name__ == "__main__":
    main()
