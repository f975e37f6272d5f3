"""Mistake: under DDP, a parameter that takes no part in the loss of a step.

    python -m tutorial.mistakes.unused_parameters

DDP waits for the gradient of every parameter before it completes a step's reduction. If one never comes, the
next forward pass raises an error. Right: a loss in which every parameter takes part, or, where some steps
leave parameters out as here, find_unused_parameters=True: DDP looks for them in each step, which takes time.
"""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tutorial.mistakes.ranks import run_on_ranks


class Heads(nn.ModuleList):
    def forward(self, inputs: torch.Tensor, task: int) -> torch.Tensor:
        return self[task](inputs)  # the other head takes no part


def train(rank: int) -> list[int]:
    """How many of 10 steps are done: the wrong way, the right way."""
    steps = [0, 0]
    for way, find_unused in enumerate((False, True)):
        model = DDP(Heads([nn.Linear(8, 1), nn.Linear(8, 1)]), find_unused_parameters=find_unused)
        try:
            for step in range(10):
                model(torch.randn(4, 8), task=step % 2).mean().backward()
                steps[way] += 1
        except RuntimeError as error:
            if rank == 0:
                print(str(error).split(". ")[0])
    return steps


if __name__ == "__main__":
    wrong, right = run_on_ranks(train)[0]
    print(f"wrong: {wrong} steps done")
    print(f"right: {right} steps done")
