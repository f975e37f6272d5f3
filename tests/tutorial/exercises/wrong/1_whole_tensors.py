# The checker says: sent \[120000, 120000, 120000, 120000\] bytes.*Each rank sends whole tensors
import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor) -> Tensor:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    total, passing = tensor.clone(), tensor
    for _ in range(world_size - 1):
        received = torch.empty_like(tensor)
        work = dist.isend(passing, (rank + 1) % world_size)
        dist.recv(received, (rank - 1) % world_size)
        assert work
        work.wait()
        total += received
        passing = received
    return total
