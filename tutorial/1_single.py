"""Lesson 1: one process. A GPT of 110,000 parameters learns a play, in 100 steps of 16 windows each.

    python -m tutorial.1_single

Prints the loss of every tenth step. On a GPU if there is one.
"""

from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from mingpt.config import ModelConfig
from mingpt.data import CharTokenizer
from mingpt.model import GPT

SEED, EPOCHS, WINDOWS, BLOCK_SIZE = 1337, 4, 400, 64
BATCH_SIZE, LEARNING_RATE, LOG_EVERY = 16, 1e-3, 10


def make_dataset() -> tuple[TensorDataset, int]:
    """Windows that lie end to end: inputs, and targets one to the right. And the size of the vocabulary."""
    text = Path("data/input.txt").read_text()
    tokenizer = CharTokenizer.train(text)
    tokens = torch.from_numpy(tokenizer.encode(text)).long()[: WINDOWS * BLOCK_SIZE + 1]
    inputs, targets = tokens[:-1].view(WINDOWS, BLOCK_SIZE), tokens[1:].view(WINDOWS, BLOCK_SIZE)
    return TensorDataset(inputs, targets), len(tokenizer)


def main() -> None:
    torch.set_num_threads(1)  # as later lessons do: the number of threads changes the last bits of a sum
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dataset, vocab_size = make_dataset()
    torch.manual_seed(SEED)
    config = ModelConfig(arch="gpt2", n_layer=2, n_head=2, n_embd=64)
    model = GPT(config, vocab_size=vocab_size, block_size=BLOCK_SIZE).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    step = 0
    for epoch in range(EPOCHS):
        order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(SEED + epoch))
        for batch in order.split(BATCH_SIZE):
            inputs, targets = (part.to(device) for part in dataset[batch])
            _, loss = model(inputs, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % LOG_EVERY == 0:
                print(f"step {step:3} loss {loss.item():.6f}")
    print(f"final loss {loss.item():.6f}")


if __name__ == "__main__":
    main()
