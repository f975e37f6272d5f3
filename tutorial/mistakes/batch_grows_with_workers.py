"""Mistake: a batch size per worker, so that the global batch grows with the workers.

    python -m tutorial.mistakes.batch_grows_with_workers

With four workers the global batch is four times as large, and an epoch has a quarter of the updates: at the
same learning rate the model learns less. Right: set the global batch, and let each worker take its share.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from tutorial.mistakes.ranks import run_on_ranks

BATCH_SIZE, LEARNING_RATE = 1024, 10.0
TEXT = torch.from_file("data/input.txt", size=25_601, dtype=torch.uint8).long()
INPUTS, TARGETS = TEXT[:-1], TEXT[1:]


def train(rank: int, world_size: int, batch_per_worker: int) -> float:
    """The loss after one epoch of SGD. The model is a table: the next character's logits by the last one."""
    table = torch.zeros(128, 128)
    order = torch.randperm(len(INPUTS), generator=torch.Generator().manual_seed(1337))
    for chosen in order[rank::world_size].split(batch_per_worker):
        table.requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(table[INPUTS[chosen]], TARGETS[chosen]), table)
        dist.all_reduce(gradient)
        table = table.detach() - LEARNING_RATE * gradient / world_size
    return cross_entropy(table[INPUTS], TARGETS).item()


def train_twice(rank: int) -> tuple[float, float]:
    return train(rank, 4, BATCH_SIZE), train(rank, 4, BATCH_SIZE // 4)


if __name__ == "__main__":
    alone = run_on_ranks(train, 1, BATCH_SIZE, world_size=1)[0]
    wrong, right = run_on_ranks(train_twice, world_size=4)[0]
    print(f"wrong: {abs(wrong - alone):.6f} between the final losses of 4 workers and of 1")
    print(f"right: {abs(right - alone):.6f} between the final losses of 4 workers and of 1")
