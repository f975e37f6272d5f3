"""Lesson 5: two nodes, each with a torchrun agent of its own, meet at an endpoint and train one model.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --max_restarts=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:29400 -m tutorial.5_nodes & TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes=2 --max_restarts=2 --rdzv_backend=c10d --rdzv_endpoint=localhost:29400 -m tutorial.5_nodes & wait

Here both agents run on this machine. In step 60 rank 1 ends itself with SIGKILL, and both start anew.
"""  # noqa: E501

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
STEPS_PER_EPOCH, TIMEOUT = WINDOWS // BATCH_SIZE, timedelta(seconds=60)
SNAPSHOT, OUT = Path("out/tutorial/5_nodes.snapshot.pt"), Path("out/tutorial/5_nodes.pt")


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
    if os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "True":
        raise ValueError("set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun, as in the command above")
    dist.init_process_group(timeout=TIMEOUT)  # rank 0 opens a store for this generation, where torchrun says
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if BATCH_SIZE % world_size:
        raise ValueError(f"{BATCH_SIZE} windows cannot be shared evenly by {world_size} workers")
    hosts, device = [("", 0)] * world_size, torch.device("cpu")
    dist.all_gather_object(hosts, (os.uname().nodename, torch.cuda.device_count()))
    here = [other for other in range(world_size) if hosts[other] == hosts[rank]]
    if all(gpus >= hosts.count((host, gpus)) for host, gpus in hosts):  # one for each worker, on every node
        device = torch.device("cuda", here.index(rank))
        torch.cuda.set_device(device)
    node, local_rank = os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"]
    print(f"rank {rank}: node {node}, local rank {local_rank}, {device}", flush=True)
    dataset, vocab_size = make_dataset()
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    gpt = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=LEARNING_RATE)
    step, found = 0, [None]
    if rank == 0 and SNAPSHOT.exists():
        found = [torch.load(SNAPSHOT, map_location="cpu", weights_only=True)]
    dist.broadcast_object_list(found)  # other nodes need not see the disk of rank 0's node
    if found[0]:
        gpt.load_state_dict(found[0]["model"])
        optimizer.load_state_dict(found[0]["optimizer"])
        step = found[0]["step"]
        print(f"rank {rank} resumed from step {step}", flush=True)
    model = DistributedDataParallel(gpt)
    while step < EPOCHS * STEPS_PER_EPOCH:
        # The order of DistributedSampler, but it depends only on the step, also in mid epoch.
        epoch, batch = divmod(step, STEPS_PER_EPOCH)
        order = torch.randperm(WINDOWS, generator=torch.Generator().manual_seed(SEED + epoch))
        mine = order.split(BATCH_SIZE)[batch][rank::world_size]
        inputs, targets = (part.to(device) for part in dataset[mine])
        _, loss = model(inputs, targets)
        if step + 1 == KILL_IN_STEP and rank == 1 and not found[0]:
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
