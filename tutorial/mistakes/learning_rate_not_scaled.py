"""Mistake: the batch grows with the workers, and the learning rate stays.

    python -m tutorial.mistakes.learning_rate_not_scaled

A batch four times as large leaves a quarter of the updates. Right while the rate is small, as 0.001 here:
four times the rate (linear scaling), because one long step does what four short ones do. At 0.003 this is
too much, and twice the rate (square root scaling) is better. Where the first steps diverge, a warm-up raises
the rate from 0; here it would only cost updates. One process shows it: its batch is that of all workers.
"""

import torch

from mingpt.config import ModelConfig
from mingpt.model import GPT

WINDOWS = torch.from_file("data/input.txt", size=512 * 32 + 1, dtype=torch.uint8).long().unfold(0, 33, 32)


def train(batch_size: int, learning_rate: float) -> float:
    """The loss over all windows after four epochs."""
    torch.manual_seed(1337)
    model = GPT(ModelConfig(arch="gpt2", n_layer=1, n_head=2, n_embd=32), vocab_size=128, block_size=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for _ in range(4):
        for windows in WINDOWS[torch.randperm(len(WINDOWS))].split(batch_size):
            model(windows[:, :-1], windows[:, 1:])[1].backward()
            optimizer.step()
            optimizer.zero_grad()
    return model(WINDOWS[:, :-1], WINDOWS[:, 1:])[1].item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for rate in (0.003, 0.001):
        alone, wrong, twice, right = (train(4 * b, n * rate) for b, n in ((1, 1), (4, 1), (4, 2), (4, 4)))
        print(
            f"rate {rate}: 1 worker {alone:.3f}; 4 workers {wrong:.3f}, rate x 2 {twice:.3f}, x 4 {right:.3f}"
        )
    print(f"wrong: {wrong:.6f} loss on 4 workers")
    print(f"right: {right:.6f} loss on 4 workers")
