"""Train a small character model by a flat script, which may be killed or stopped at any moment.

    python examples/plain_loop.py
    torchrun --standalone --nproc_per_node=2 --max-restarts=3 examples/plain_loop.py    # with DDP

This project must be on PYTHONPATH, or installed. The same command goes on from the newest snapshot in the
folder plain_loop/. The last line of output, a hash of the weights, is the same whatever was killed or
stopped, for a fixed number of workers. docs/any-loop.md explains the lines that are marked with (1) to (4).
"""

import hashlib
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from mingpt.distributed import StopSignal
from mingpt.snapshot import Checkpoint

steps, save_every, batch_size, block_size, width = 400, 20, 8, 32, 32

is_ddp = "RANK" in os.environ
if is_ddp:
    torch.distributed.init_process_group("gloo")
rank, workers = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))

text = (Path(__file__).parent.parent / "data" / "input.txt").read_text()
characters = sorted(set(text))
data = torch.tensor([characters.index(character) for character in text[:100_000]])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(len(characters), width), nn.Linear(width, len(characters))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.size(1))
        return self.head(self.blocks(self.embedding(tokens), mask, is_causal=True))


torch.manual_seed(1)
model: nn.Module = Model()
if is_ddp:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

stop = StopSignal()  # (1)
checkpoint = Checkpoint("plain_loop", keep=2)  # (2)
state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
step = checkpoint.load(state) or 0
while step < steps:
    torch.manual_seed(1000 * step + rank)  # (3)
    starts = torch.randint(len(data) - block_size, (batch_size,)).tolist()
    x = torch.stack([data[start : start + block_size] for start in starts])
    y = torch.stack([data[start + 1 : start + block_size + 1] for start in starts])
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    step += 1
    if rank == 0 and step % 100 == 0:
        print(f"step {step}  loss {loss.item():.4f}", flush=True)
    is_told_to_stop = stop.agreed()  # (4)
    if is_told_to_stop or step % save_every == 0 or step == steps:
        checkpoint.save(step, state)
    if is_told_to_stop:
        break
checkpoint.wait()
if rank == 0 and step == steps:
    content = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    print("weights", hashlib.sha256(content).hexdigest())
if is_ddp:
    torch.distributed.destroy_process_group()
