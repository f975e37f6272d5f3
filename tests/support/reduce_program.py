"""One rank of two: reduces the gradients of a few micro-batches by both strategies and saves them.

Its arguments are the rank, the file through which the ranks meet, and the file to save to.
"""

import sys

import torch
from torch import Tensor

from mingpt.distributed import DistributedContext, Launch
from mingpt.model import LossModule
from mingpt.parallel import STRATEGIES, StrategySetup, exact
from support.training import make_model

MICRO_BATCHES = 5


class TwoRanks(DistributedContext):
    """The context of a rank whose process group is there already."""

    def __init__(self, rank: int) -> None:
        self.launch = Launch(
            rank=rank, world_size=2, local_rank=rank, local_world_size=2, master_addr="localhost"
        )
        self.rank, self.world_size = rank, 2
        self.device = torch.device("cpu")
        self.rendezvous = None


def reduce_step(reduction: str, context: DistributedContext, parts: list[range]) -> dict[str, Tensor]:
    """The gradients of a step whose micro-batches are split so among the ranks."""
    model, _ = make_model("adamw", "gpt2")
    parameters = list(model.parameters())
    setup = StrategySetup(LossModule(model), parameters, parts, (2, 8), context, False)
    strategy = STRATEGIES[reduction](setup)
    batches = torch.randint(0, 11, (MICRO_BATCHES, 2, 9), generator=torch.Generator().manual_seed(3))
    strategy.start_step()
    for number in strategy.my_micro_batches:
        with strategy.micro_batch(number):
            loss = strategy.forward(batches[number, :, :-1], batches[number, :, 1:])
            (loss * strategy.loss_scale).backward()
    strategy.finish_step()
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def main(rank: int, store_file: str, output_file: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    exact.BUCKET_BYTES = 4096  # so that a small model has several buckets
    context = TwoRanks(rank)
    gradients = {}
    for case, parts in {"even": [range(2), range(2, 5)], "idle": [range(5), range(0)]}.items():
        for reduction in STRATEGIES:
            gradients[f"{reduction} {case}"] = reduce_step(reduction, context, parts)
    torch.save(gradients, output_file)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
