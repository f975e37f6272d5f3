"""Mistake: under DDP, ranks with different numbers of batches.

    python -m tutorial.mistakes.uneven_batches

Rank 0 has nine of 17 batches. In the last it waits for rank 1, until gloo's timeout (30 minutes, here 5 s) or
rank 1's exit. Right: `Join`. A rank without batches adds zeros to all-reduces. At the end it is sent the
weights, but not AdamW's averages. Or DistributedSampler, which pads or leaves samples out (drop_last=True).
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP

from tutorial.mistakes.ranks import run_on_ranks


def train(rank: int, joins: bool) -> int:
    """How many batches this rank has trained on."""
    model, done = torch.nn.Linear(8, 1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dist.barrier()  # ranks do not start at the same time, which must not count against the timeout
    ddp_model = DDP(model, process_group=dist.new_group(timeout=timedelta(seconds=5)))
    try:
        with Join([ddp_model], enable=joins):
            for inputs in torch.randn(17, 4, 8)[rank::2]:
                ddp_model(inputs).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
    except RuntimeError as error:
        print(f"rank {rank}, batch {done + 1}: {error}", flush=True)
    return done


if __name__ == "__main__":
    print(f"wrong: {sum(run_on_ranks(train, False))} batches that the ranks have trained on")
    print(f"right: {sum(run_on_ranks(train, True))} batches that the ranks have trained on")
