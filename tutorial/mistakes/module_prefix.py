"""Mistake: saving the state_dict of the DistributedDataParallel wrapper.

    python -m tutorial.mistakes.module_prefix

The wrapper's names begin with `module.`, so a plain model has none of them. With `strict=False` nothing is
loaded, nothing fails, and the model keeps its random weights.
Right: save `ddp_model.module.state_dict()`, and load it strictly.
"""

import tempfile

import torch
from torch.nn.parallel import DistributedDataParallel

from mingpt.config import ModelConfig
from mingpt.model import GPT
from tutorial.mistakes.ranks import run_on_ranks


def make_model() -> GPT:
    return GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=2, n_embd=32), vocab_size=128, block_size=64)


def save(rank: int, folder: str) -> None:
    ddp_model = DistributedDataParallel(make_model())
    if rank == 0:
        torch.save(ddp_model.state_dict(), f"{folder}/wrong")
        torch.save(ddp_model.module.state_dict(), f"{folder}/right")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(save, folder)
        wrong, right = torch.load(f"{folder}/wrong"), torch.load(f"{folder}/right")
    model = make_model()
    missing, unexpected = model.load_state_dict(wrong, strict=False)
    print(f"not found in the file: {missing[0]} and others; not used: {unexpected[0]} and others")
    print(f"wrong: {len(wrong) - len(unexpected)} tensors loaded")
    print(f"right: {len(right) - len(model.load_state_dict(right).unexpected_keys)} tensors loaded")
