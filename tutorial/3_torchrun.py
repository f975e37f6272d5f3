"""Lesson 3: the same two workers, started by torchrun, which tells each who it is.

    torchrun --standalone --nproc_per_node=2 -m tutorial.3_torchrun

With --nproc_per_node=1, 4 or 8 the batch is still 16 windows, and so the loss is the same.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, BLOCK_SIZE = 1337, 4, 400, 64
BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 1e-3, 10
OUT = Path("out/tutorial/3_torchrun.pt")


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
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):  # workers of this machine
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()  # from MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE, set by torchrun
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        raise ValueError(f"{BATCH_SIZE} windows cannot be shared evenly by {world_size} workers")

    dataset, vocab_size = make_dataset()
    sampler: DistributedSampler[int] = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, BATCH_SIZE // world_size, sampler=sampler)
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    model = DistributedDataParallel(gpt)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            _, loss = model(inputs.to(device), targets.to(device))
            loss.backward()  # and the mean of all ranks' gradients
            optimizer.step()
            optimizer.zero_grad()
            step += 1
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
