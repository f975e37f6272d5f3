# The checker says: all_reduce returned nothing; it has to be a tensor of shape \[10000\]
import torch.distributed as dist
from torch import Tensor


def all_reduce(tensor: Tensor) -> None:
    other = dist.get_rank() ^ 1
    received = tensor.clone()
    work = dist.isend(tensor, other)
    dist.recv(received, other)
    assert work
    work.wait()
    tensor += received
