# The checker says: sent \[120000, 40000, 40000, 40000\] bytes, and a ring sends .*All go through rank 0
import torch
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor) -> Tensor:
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, 0)
        return tensor
    for other in range(1, dist.get_world_size()):
        received = torch.empty_like(tensor)
        dist.recv(received, other)
        tensor += received
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, other)
    return tensor
