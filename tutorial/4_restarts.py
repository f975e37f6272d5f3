"""Lesson 4: a worker is killed; torchrun starts all again, and they go on from the newest snapshot.

    torchrun --standalone --nproc_per_node=2 --max_restarts=2 -m tutorial.4_restarts

In step 60 rank 1 ends itself with SIGKILL. The newest snapshot then is that of step 40. A run that
goes on from a snapshot kills no worker, and one that has ended leaves none.
"""

import os
import signal
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, BLOCK_SIZE = 1337, 4, 400, 64
BATCH_SIZE, LEARNING_RATE, LOG_EVERY, SAVE_EVERY, KILL_IN_STEP = 16, 1e-3, 10, 20, 60
STEPS_PER_EPOCH = WINDOWS // BATCH_SIZE
SNAPSHOT, OUT = Path("out/tutorial/4_restarts.snapshot.pt"), Path("out/tutorial/4_restarts.pt")


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
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if BATCH_SIZE % world_size:
        raise ValueError(f"{BATCH_SIZE} windows cannot be shared evenly by {world_size} workers")
    # The agent's store outlives the workers: keys that dead ones left must not be taken for new ones.
    agents_store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], agents_store)
    timeout = timedelta(seconds=60)  # for a frozen worker; else 30 minutes with gloo, 10 with NCCL
    dist.init_process_group(store=store, rank=rank, world_size=world_size, timeout=timeout)

    dataset, vocab_size = make_dataset()
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)
    step, resumed = 0, SNAPSHOT.exists()
    if resumed:
        state = torch.load(SNAPSHOT, map_location="cpu", weights_only=True)
        gpt.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank} resumed from step {step}", flush=True)
    model = DistributedDataParallel(gpt)
    while step < EPOCHS * STEPS_PER_EPOCH:
        # The order of DistributedSampler, but it depends only on the step, also in mid epoch.
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order.split(BATCH_SIZE)[batch][rank::world_size]
        inputs, targets = (part.to(device) for part in dataset[mine])
        _, loss = model(inputs, targets)
        if step + 1 == KILL_IN_STEP and rank == 1 and not resumed:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()  # and the mean of all ranks' gradients
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % LOG_EVERY == 0:
            report(f"step {step:3}", loss)
        if step % SAVE_EVERY == 0 and rank == 0:
            SNAPSHOT.parent.mkdir(parents=True, exist_ok=True)
            state = {"model": gpt.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            path = SNAPSHOT if step < EPOCHS * STEPS_PER_EPOCH else OUT
            torch.save(state, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)  # whoever is killed before this leaves the older one

    report("final", loss)
    if rank == 0:
        SNAPSHOT.unlink(missing_ok=True)  # finished: the next run begins anew
    dist.destroy_process_group()
    os._exit(0)  # at once, without the end of the interpreter, which threads of the group may disturb


if __name__ == "__main__":
    main()
