"""Lesson 7: evaluation by all ranks, of every window once, however many windows and workers there are.

    torchrun --standalone --nproc_per_node=2 -m tutorial.7_evaluate

The 101 windows cannot be shared evenly. With --nproc_per_node=1 or 4 the same loss is printed.
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

SEED, EPOCHS, WINDOWS, EVAL_WINDOWS, BLOCK_SIZE = 1337, 4, 400, 101, 64
BATCH_SIZE, MICRO_BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 4, 1e-3, 10
STEPS_PER_EPOCH = WINDOWS // BATCH_SIZE
OUT = Path("out/tutorial/7_evaluate.pt")


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
    """Each window once: rank r of n takes r, r + n, r + 2 n, ... A collective: all ranks call it."""
    gpt.eval()  # not the DDP module: its forward pass may send buffers, and ranks have unequal counts
    rank, world_size = dist.get_rank(), dist.get_world_size()
    losses = {}
    for window in range(rank, len(dataset), world_size):
        inputs, targets = dataset[window : window + 1]
        losses[window] = gpt(inputs.to(device), targets.to(device))[1].item()
    gpt.train()
    total = torch.tensor([sum(losses.values()), len(losses)], dtype=torch.float64, device=device)
    by_rank = [torch.empty_like(total) for _ in range(world_size)]
    dist.all_gather(by_rank, total)  # tensors of one shape, one of each rank
    dist.all_reduce(total)  # their sum: of losses, of windows
    all_losses = [losses for _ in range(world_size)]  # replaced by those of each rank
    dist.all_gather_object(all_losses, losses)  # anything that can be pickled, of any size
    if rank == 0:
        loss, window = max((loss, window) for found in all_losses for window, loss in found.items())
        print(f"hardest window {window}: {loss:.6f}; windows by rank {[int(count) for _, count in by_rank]}")
        print(f"validation loss {total[0] / total[1]:.6f} of {int(total[1])} windows", flush=True)


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
    evaluate(gpt, eval_dataset, device)
    report("final", loss)
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


if __name__ == "__main__":
    main()
