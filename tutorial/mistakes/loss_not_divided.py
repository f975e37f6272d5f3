"""Mistake: gradient accumulation without `loss / accumulation_steps`.

    python -m tutorial.mistakes.loss_not_divided

`backward` adds to the gradients: the mean losses of 8 micro-batches give 8 times the gradient of the batch's
mean loss. AdamW hides the factor, but clipping now cuts every gradient. Right: divide each loss by 8.
"""

import torch
from torch.nn.utils import clip_grad_norm_

from mingpt.config import ModelConfig
from mingpt.model import GPT

STEPS, BATCH_SIZE, MAX_NORM = 20, 16, 3.0
TEXT = torch.from_file("data/input.txt", size=STEPS * BATCH_SIZE * 64 + 1, dtype=torch.uint8).long()


def train(micro_batches: int, divisor: int) -> int:
    """The number of steps whose gradient was clipped."""
    torch.manual_seed(1337)
    model = GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=2, n_embd=32), vocab_size=128, block_size=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    norms = []
    for batch in TEXT.unfold(0, 65, 64).split(BATCH_SIZE):
        for windows in batch.chunk(micro_batches):
            _, loss = model(windows[:, :-1], windows[:, 1:])
            (loss / divisor).backward()
        norms.append(clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    print(f"micro-batches {micro_batches}, loss / {divisor}: norm {norms[0]:.3f}, at the end {norms[-1]:.3f}")
    return sum(norm > MAX_NORM for norm in norms)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, wrong, right = train(1, divisor=1), train(8, divisor=1), train(8, divisor=8)
    print(f"wrong: {wrong} steps whose gradient was clipped")
    print(f"right: {right} steps whose gradient was clipped")
