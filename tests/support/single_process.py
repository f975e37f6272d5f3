"""A context of one rank without a process group, for tests that start no job."""

import torch

from mingpt.distributed import DistributedContext, Launch


class SingleProcess(DistributedContext):
    """Neither signals nor exits are handled, unlike in a worker."""

    def __init__(self) -> None:
        self.launch = Launch()
        self.rank, self.world_size = 0, 1
        self.device = torch.device("cpu")
        self.rendezvous = self.memory = None
