"""Mistake: clipping while the gradients are still multiplied by GradScaler's scale.

    python -m tutorial.mistakes.clip_before_unscale

The gradients are 65536 times too large until `scaler.step` divides them by the scale. Clipping cuts them to
the norm 1, and the division then leaves almost nothing. With SGD, as here, the model does not learn; Adam
divides by the gradient's size and nearly hides it. Right: `scaler.unscale_(optimizer)` before clipping.
"""

import torch
from torch.nn.utils import clip_grad_norm_

from mingpt.config import ModelConfig
from mingpt.model import GPT

TEXT = torch.from_file("data/input.txt", size=20 * 16 * 64 + 1, dtype=torch.uint8).long()


def train(unscale: bool) -> float:
    """The loss of the last of 20 steps of SGD."""
    torch.manual_seed(1337)
    model = GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=2, n_embd=32), vocab_size=128, block_size=64)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.5), torch.amp.GradScaler("cpu")
    for windows in TEXT.unfold(0, 65, 64).split(16):
        with torch.autocast("cpu", torch.float16):
            _, loss = model(windows[:, :-1], windows[:, 1:])
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"wrong: {train(unscale=False):.6f} loss after 20 steps")
    print(f"right: {train(unscale=True):.6f} loss after 20 steps")
